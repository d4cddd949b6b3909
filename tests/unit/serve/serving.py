"""A server in this process, and how a client without a library calls it."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerodrift.engine.engine import Engine
from zerodrift.serve.access import ServeAccess
from zerodrift.serve.limits import ServeLimits
from zerodrift.serve.listening import listen
from zerodrift.serve.server import RolloutServer
from zerodrift.serve.settings import ServeSettings
from zerodrift.web.access import names_of

MODEL = "testbed:qwen3"
ADMIN, INFERENCE = "admin-token-of-tests", "inference-token-of-tests"


class Answer(NamedTuple):
    status: int
    content: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]

    @property
    def events(self) -> list[Any]:
        """Of a stream that ended with [DONE]."""
        *events, done = [part for part in self.content.decode().split("\n\n") if part]
        assert done == "data: [DONE]"
        return [json.loads(each.removeprefix("data: ")) for each in events]


class Served:
    """A server in this process, and how a client without a library calls it."""

    def __init__(self, server: RolloutServer, port: int, root: Path) -> None:
        self.server, self.port, self.root = server, port, root

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://zd:{ADMIN}@127.0.0.1:{self.port}"

    def raw(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, answer.read(), found)
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, token: str | None = None) -> Answer:
        content = None if body is None else json.dumps(body).encode()
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return self.raw("POST", path, content, content_type="application/json", **headers)

    def get(self, path: str, token: str | None = None) -> Answer:
        return self.raw("GET", path, **({} if token is None else {"authorization": f"Bearer {token}"}))

    def admin(self, path: str, body: Any = None) -> Answer:
        return self.post(path, body, ADMIN)


def serve(
    root: Path,
    *,
    model: str = MODEL,
    inference: str | None = None,
    limits: ServeLimits | None = None,
    state: Path | None = None,
    **engine: Any,
) -> Iterator[Served]:
    """One that is up, and comes to its end."""
    found = listen("127.0.0.1", 0)
    port = found.getsockname()[1]
    access = ServeAccess(names_of("127.0.0.1"), ADMIN, inference)
    settings = ServeSettings(model=model, weight_root=root, state=state, limits=limits or ServeLimits())
    server = RolloutServer(Engine(model, **engine), access, settings)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=([found], ready.set))
    thread.start()
    assert ready.wait(60)
    yield Served(server, port, root)
    server.stop()
    thread.join(30)
    assert not thread.is_alive()
