"""The server behind `zerodrift view`: the page, its events, and batches by their names in the index. Nothing else.

No path of a request ever becomes a path of the file system.
"""

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from zerodrift import __version__
from zerodrift.core.errors import ZerodriftError
from zerodrift.records.directory import VERDICT
from zerodrift.view.live.access import Access
from zerodrift.view.live.feed import Feed
from zerodrift.view.live.page import COMMON, INERT, Page, live_page
from zerodrift.view.visible import visible

HEARTBEAT_S = 10.0
"""Between two signs of life: a proxy hangs up after 30 s without, and a viewer that left is noticed."""
MOST_VIEWERS = 50
"""Streams at a time, a thread each."""
_BATCH = re.compile(r"/batches/([0-9a-f]{64})(?:/(\d{1,6}))?")


class LiveServer(ThreadingHTTPServer):
    """Answers for one directory."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], feed: Feed, access: Access) -> None:
        """Bound when this returns; `serve_forever` answers."""
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.feed, self.access = feed, access
        self.viewers = threading.BoundedSemaphore(MOST_VIEWERS)
        self._report: tuple[tuple[int, int], Page] | None = None
        self._rendering = threading.Lock()
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Without the reverse look-up of http.server, which waits for a name server that may not be there."""
        # As TCPServer: the port may be taken again at once after an end.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer that left is no event; anything else is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def page(self) -> Page:
        """The report of an audit that is done, else the live page."""
        verdict = self.feed.directory / VERDICT
        if not verdict.is_file() or self.feed.series.last is not None:
            return live_page(self.feed.directory.resolve().name)
        from zerodrift.view.report import render  # noqa: PLC0415 - Jinja and Plotly, which a training does not need

        told = verdict.stat()
        key = (told.st_mtime_ns, told.st_size)
        with self._rendering:
            if self._report is None or self._report[0] != key:
                # The report has a policy of its own in its head.
                self._report = key, Page(render(self.feed.directory).encode(), "frame-ancestors 'none'")
            return self._report[1]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: LiveServer
    server_version, sys_version = f"zerodrift/{__version__}", ""
    timeout = 30
    """Seconds that a silent client holds a thread."""

    def log_message(self, *_: object) -> None:
        """Nothing: a query may hold the token."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself, in our form: other methods than GET, lines that are none."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered"
        self._refuse(code, message or HTTPStatus(code).phrase)

    def do_GET(self) -> None:
        """The only method there is."""
        local = str(self.connection.getsockname()[0])
        if not self.server.access.knows_host(self._one("host"), local):
            self._refuse(
                421, "this server is not known by that name; open the address that `zerodrift view` printed"
            )
            return
        url = urlsplit(self.path)
        if not self._is_admitted(url.path, url.query):
            return
        try:
            self._route(url.path, url.query)
        except ZerodriftError as error:
            self._json({"code": error.code, "says": visible(str(error))}, 404)

    def _one(self, name: str) -> str | None:
        """A header that was sent once; twice is as bad as never."""
        values = self.headers.get_all(name, [])
        return values[0] if len(values) == 1 else None

    @property
    def _cookie(self) -> str:
        """By port: cookies of one host are shared by all of its ports."""
        return f"zerodrift_view_{self.server.server_port}"

    def _is_admitted(self, path: str, query: str) -> bool:
        access = self.server.access
        if access.asks and path == "/" and (given := parse_qs(query).get("token")):
            if len(given) == 1 and access.is_token(given[0]):
                # Out of the address, so that it is in no history and in no screenshot.
                cookie = f"{self._cookie}={access.cookie_value}; HttpOnly; SameSite=Strict; Path=/"
                self._answer(303, b"", "text/plain", {"location": "/", "set-cookie": cookie})
            else:
                self._refuse(401, "this token is not the one that `zerodrift view` printed")
            return False
        if access.admits(self._cookie, self._one("cookie") or "", self._one("authorization") or ""):
            return True
        self._refuse(401, "this page needs its token; open the address that `zerodrift view` printed")
        return False

    def _route(self, path: str, query: str) -> None:
        if path == "/":
            page = self.server.page()
            self._answer(200, page.body, "text/html; charset=utf-8", {"content-security-policy": page.policy})
        elif path == "/events":
            self._events()
        elif path == "/favicon.ico":
            self._answer(204, b"", "text/plain")
        elif match := _BATCH.fullmatch(path):
            self._batch(match[1], match[2], query)
        else:
            self._refuse(404, "there is nothing here; the page is at /")

    def _batch(self, name: str, place: str | None, query: str) -> None:
        batches = self.server.feed.batches
        if place is None:
            self._json(batches.rollouts(name))
            return
        begin = parse_qs(query).get("from", ["0"])[-1]
        if not re.fullmatch(r"[0-9]{1,9}", begin):
            self._refuse(400, "from is the number of a token")
            return
        self._json(batches.tokens(name, int(place), int(begin)))

    def _events(self) -> None:
        feed = self.server.feed
        try:
            cursor = feed.resume(self.headers.get("last-event-id"))
        except ValueError as error:
            self._refuse(400, str(error))
            return
        if not self.server.viewers.acquire(blocking=False):
            self._refuse(503, f"{MOST_VIEWERS} viewers are looking already; close a page")
            return
        try:
            self._head(200, "text/event-stream", {})
            while not feed.closed:
                version, events = feed.after(cursor)
                for event in events or (b": \n\n",):
                    self.wfile.write(event)
                if not events:
                    feed.wait(version, HEARTBEAT_S)
        finally:
            self.server.viewers.release()

    # --- answering ---------------------------------------------------------------------------------------------------

    def _json(self, content: Any, status: int = 200) -> None:
        self._answer(status, msgspec.json.encode(content), "application/json")

    def _refuse(self, status: int, says: str) -> None:
        with contextlib.suppress(OSError):
            self._answer(status, f"{says}\n".encode(), "text/plain; charset=utf-8")

    def _answer(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self._head(status, kind, {"content-length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _head(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        policy = {"content-security-policy": INERT}
        allow = {"allow": "GET"} if status == 405 else {}
        for name, value in {**COMMON, "content-type": kind, **policy, **allow, **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def open_server(directory: Path, host: str, port: int, access: Access) -> LiveServer:
    """Bound, and reading."""
    feed = Feed(directory)
    server = LiveServer((host, port), feed, access)
    feed.start()
    return server
