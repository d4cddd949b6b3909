"""What the peer servers share: the standard library's HTTP server on loopback, routes, and server-sent events.

A peer is a set of routes and a way of saying that a route does not exist. Nothing about any engine's format is here.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import urlsplit

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Call:
    headers: dict[str, str]
    raw: bytes

    def json(self) -> Any:
        """Raises ValueError for what is not JSON."""
        return json.loads(self.raw)


@dataclass(frozen=True)
class Answer:
    """None is an empty body; JSON is encoded here, and a string so becomes a string in quotes."""

    body: Any = None
    status: int = 200
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        if self.media == "application/json" and self.body is not None:
            # No NaN and no Infinity: no real server here sends what is not JSON.
            return json.dumps(self.body, allow_nan=False, ensure_ascii=False).encode()
        return (self.body or "").encode()


@dataclass(frozen=True)
class Events:
    """Whole events, each with its empty line. An exception while they are made breaks the connection off."""

    stream: Iterator[str]


class Refused(Exception):
    """Raised by a route to answer early."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body)
        self.answer = answer


def not_in_this_peer(what: str) -> Refused:
    """The real server can do it and the peer cannot: no test must mistake this for the engine's own refusal."""
    return Refused(Answer(f"the peer server does not implement {what}", 501, TEXT))


class Peer(Protocol):
    @property
    def routes(self) -> dict[str, Callable[[Call], Answer | Events]]:
        """`"METHOD /path"` to what answers it."""

    def absent(self, status: int) -> Answer:
        """404 for a path, 405 for a method."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    peer: Peer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: 40 ms a call otherwise
    server: _Server

    def handle_call(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        call = Call({name.lower(): value for name, value in self.headers.items()}, raw)
        path = urlsplit(self.path).path
        routes = self.server.peer.routes
        route = routes.get(f"{self.command} {path}")
        if route is None:
            known = any(name.endswith(f" {path}") for name in routes)
            self._send(self.server.peer.absent(405 if known else 404))
            return
        try:
            answer = route(call)
        except Refused as refused:
            answer = refused.answer
        except Exception:  # any server says this much and no more
            answer = Answer("Internal Server Error", 500, TEXT)
        if isinstance(answer, Events):
            self._stream(answer)
        else:
            self._send(answer)

    do_GET = do_POST = do_PUT = handle_call

    def _send(self, answer: Answer) -> None:
        body = answer.encoded()
        self.send_response(answer.status)
        self.send_header("content-length", str(len(body)))
        if body:
            self.send_header("content-type", answer.media)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, events: Events) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for event in events.stream:
                chunk = event.encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        except Exception:  # the status line is gone already
            self.close_connection = True
            return
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: object) -> None:
        """Tests keep the terminal for themselves."""


@contextlib.contextmanager
def listening(peer: Peer, port: int = 0) -> Iterator[str]:
    """Serves in a thread while the block runs; port 0 takes a free one."""
    server = _Server(("127.0.0.1", port), _Handler)
    server.peer = peer
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
