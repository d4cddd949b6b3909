"""Sockets, and the uvicorn that serves an application on them within our limits. Torch-free."""

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from zerodrift.core.errors import ConfigError
from zerodrift.serve.limits import HEADER_BYTES, ServeLimits
from zerodrift.serve.protocol import BoundedProtocol

KEEP_ALIVE_S = 30
BACKLOG = 1024
OTHER_FILES = 512
"""Beside connections: weights, versions, logs, libraries."""


def http_server(app: Any, limits: ServeLimits) -> "QuietServer":
    """Of an ASGI application; nothing runs yet."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(limits.drain_s)),
        limit_concurrency=limits.connections,
        h11_max_incomplete_event_size=HEADER_BYTES,
        backlog=BACKLOG,
    )
    return QuietServer(config)


class QuietServer(uvicorn.Server):
    """One that ends quietly: a signal is how it is meant to end, and is not raised again behind it."""

    on_exit: Callable[[], None] = staticmethod(lambda: None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        told = (signal.SIGINT, signal.SIGTERM)
        for number in told:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in told:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_exit()
        await super().shutdown(sockets)


def allow_files(limits: ServeLimits) -> None:
    """Room for every connection: a shell's 1,024 would leave clients that only connect nothing to read weights by."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * limits.connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def listen(host: str, port: int) -> socket.socket:
    """Bound and listening: who comes before the engine is there waits, and is not turned away."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By the protocol's name: asyncio turns Nagle off for that alone, and without it every answer, whose head and body are two
    # writes, waits 40 ms for the client's acknowledgement of the first.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); --port 0 takes a free one"
        ) from error
    return found
