"""A real server on loopback, written with the standard library alone, that says what a test tells it to."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Call:
    method: str
    path: str
    body: Any
    headers: dict[str, str]


@dataclass
class Loopback:
    """Routes are `"METHOD /path"` to a function of the call; it returns (status, JSON) or writes by itself."""

    url: str
    routes: dict[str, Callable[..., Any]]
    calls: list[Call] = field(default_factory=list)

    def to(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = (
        128  # adapters connect 32 times at once: behind five the others wait a second for another try
    )
    loopback: Loopback


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: 40 ms a call otherwise
    server: _Server

    def answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = Call(self.command, self.path, json.loads(raw) if raw else None, headers)
        loopback = self.server.loopback
        loopback.calls.append(call)
        route = loopback.routes.get(f"{self.command} {self.path}")
        if route is None:
            known = any(name.split(" ", 1)[1] == self.path for name in loopback.routes)
            self.send(405 if known else 404, {"detail": "Method Not Allowed" if known else "Not Found"})
            return
        result = route(call, self)
        if result is not None:
            self.send(*result)

    do_GET = do_POST = do_PUT = answer

    def send(self, status: int, answer: object, **headers: str) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def stream(self, events: list[bytes]) -> None:
        """Server-sent events, each a chunk of its own."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in events:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: object) -> None:
        """Tests keep the terminal for themselves."""


@contextlib.contextmanager
def serving() -> Iterator[Loopback]:
    """A server without routes, for as long as the block runs."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.loopback = Loopback(f"http://127.0.0.1:{server.server_address[1]}", {})
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.loopback
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(document: object) -> bytes:
    return b"data: %s\n\n" % (document if document == "[DONE]" else json.dumps(document)).encode()
