"""A proxy in this process, before whatever a test puts at an address."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from serving import ADMIN, MODEL, Served

from zerodrift.serve.access import ServeAccess
from zerodrift.serve.listening import listen
from zerodrift.serve.shadow.routes import BY_PATH
from zerodrift.serve.shadow.server import ShadowServer, ShadowSettings
from zerodrift.web.access import names_of


@contextlib.contextmanager
def shadowing(url: str, *, inference: str | None = None, **settings: Any) -> Iterator[Served]:
    """One that is up, and comes to its end; `settings` as in ShadowSettings, and nothing is scored unless they say so."""
    found = listen("127.0.0.1", 0)
    access = ServeAccess(names_of("127.0.0.1"), ADMIN, inference, routes=BY_PATH)
    told = ShadowSettings(**{"model": MODEL, "url": url, "rescore_every": 0} | settings)
    server = ShadowServer(access, told)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=([found], ready.set))
    thread.start()
    assert ready.wait(60)
    try:
        yield Served(server, found.getsockname()[1], told.weight_root)
    finally:
        server.stop()
        thread.join(40)
        assert not thread.is_alive()
