"""A real server on loopback, written with the standard library alone, that says what a test tells it to."""

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

# The peers, and what the suites share, are plain modules that find each other as scripts do.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "peers")]
pytest.register_assert_rewrite("promises", "asking")


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
    loopback: Loopback


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: 40 ms a call otherwise
    server: _Server

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        raw = self.rfile.read(length)
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


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.loopback = Loopback(f"http://127.0.0.1:{server.server_address[1]}", {})
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.loopback
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """What is handed to it is closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda opened: stack.enter_context(contextlib.closing(opened))


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A script in the place of an engine's interpreter, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> Path:
        script = tmp_path / "python"
        script.write_text(f"#!{sys.executable}\n{source}")
        script.chmod(0o755)
        return script

    return write


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories with the weights of the testbed, with others, and with others of another shape."""
    from opened import write_checkpoints

    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))
