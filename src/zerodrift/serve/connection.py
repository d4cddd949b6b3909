"""One HTTP call at the level of ASGI: a body within its limits, an answer to a reader that may be slow or gone. Torch-free.

What the server of our engine and the proxy before another have in common: both count before they hold.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from zerodrift.serve.access import Caller
from zerodrift.serve.call import JSON, CallReply
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.limits import BODY_S, NO_BODY_BYTES, STALLED_S, ServeLimits
from zerodrift.serve.routes import Level

Message = MutableMapping[str, Any]
Send = Callable[[Message], Any]
Receive = Callable[[], Any]
COMMON = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class ClientGone(Exception):
    """Nobody is left to answer."""


class Connection(NamedTuple):
    """What ASGI gives for one call."""

    scope: Mapping[str, Any]
    receive: Receive
    send: Send


class HeldBody:
    """The body of one call, counted for as long as it is held."""

    def __init__(self, among: "Bodies") -> None:
        self.content = b""
        self._among, self._size = among, 0

    def grow(self, size: int) -> None:
        """Some of it has come."""
        self._size += size
        self._among.held += size

    def let_go(self) -> None:
        """Nobody needs it any more. Safe to call twice."""
        self.content = b""
        self._among.held -= self._size
        self._size = 0


class Bodies:
    """Those that are held, all together within one limit."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self.held = 0
        """Bytes, now."""

    @asynccontextmanager
    async def read(self, connection: Connection, *, takes: bool) -> AsyncIterator[HeldBody]:
        """The whole body of a route that `takes` one, held for as long as the context lasts, or until it is let go."""
        headers = dict(connection.scope["headers"])
        _check_form(headers)
        promised = headers.get(b"content-length", b"")
        # Anybody may call some of the routes without a body, and must not hold the memory of those with one.
        most = self._limits.body_bytes if takes else NO_BODY_BYTES
        if promised and (not promised.isdigit() or len(promised) > 18 or int(promised) > most):
            raise CallRefused(413, f"a body has at most {most} bytes", code="limit")
        body = HeldBody(self)
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    body.content = await self._whole(connection, body, most)
            except TimeoutError:
                raise CallRefused(408, f"the body did not come within {BODY_S:g} s", code="timeout") from None
            if body.content and not _is_json(headers.get(b"content-type", b"")):
                raise CallRefused(
                    415, "a body is JSON, and says so: Content-Type: application/json", code="body/media"
                )
            yield body
        finally:
            body.let_go()

    async def _whole(self, connection: Connection, body: HeldBody, most: int) -> bytes:
        content, more = bytearray(), True
        while more:
            message = await connection.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece, more = message.get("body", b""), message.get("more_body", False)
            self._check_size(len(content) + len(piece), len(piece), most)
            content += piece
            body.grow(len(piece))
        return bytes(content)

    def _check_size(self, length: int, new: int, most: int) -> None:
        if length > most:
            raise CallRefused(413, f"a body has at most {most} bytes", code="limit")
        if self.held + new > self._limits.bodies_bytes:
            raise CallRefused(
                429,
                "too many large bodies are held; come again",
                code="limit",
                headers={"retry-after": "1"},
            )


def check_crowd(connection: Connection, level: Level) -> None:
    """Where too many are connected, those who generate come again; a probe or a trainer that could not call would do harm."""
    if level is Level.INFERENCE and connection.scope.get("zerodrift.crowded"):
        raise CallRefused(
            429, "too many connections are open; come again", code="limit", headers={"retry-after": "1"}
        )


def _check_form(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a body whose end, or whose bytes, somebody between the client and us may have read differently."""
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise CallRefused(
            400, "Content-Length and Transfer-Encoding are both there; send one", code="body/length"
        )
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise CallRefused(415, "a body is JSON as it is, and not compressed", code="body/encoding")


def _is_json(content_type: bytes) -> bool:
    """JSON is UTF-8; other parameters mean nothing."""
    media, *parameters = (part.strip().lower() for part in content_type.split(b";"))
    told = {
        name.strip(): value.strip(b'" ') for name, _, value in (each.partition(b"=") for each in parameters)
    }
    return media == b"application/json" and told.get(b"charset", b"utf-8") == b"utf-8"


def caller_of(scope: Mapping[str, Any], path: str) -> Caller:
    """What is looked at to let somebody in."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    host, port = scope.get("server") or ("", None)
    return Caller(scope["method"], path, headers, str(host), port)


async def unless_left(connection: Connection, work: asyncio.Task[int]) -> int:
    """What `work` comes to; it is cancelled where the client leaves before."""
    leaving = asyncio.create_task(_left(connection.receive))
    try:
        done, _ = await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if work not in done:
            raise ClientGone
        return work.result()
    finally:
        for task in (work, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def told(refusal: CallRefused) -> CallReply:
    """A refusal as an answer."""
    return CallReply(refusal.body, refusal.status, JSON, refusal.headers)


async def reply(connection: Connection, answer: CallReply, *, close: bool = False) -> int:
    """Send all of it; the status comes back."""
    content = answer.encoded
    headers = {"content-type": answer.media, "content-length": str(len(content)), **COMMON, **answer.headers}
    if close:
        headers["connection"] = "close"
    start = {"type": "http.response.start", "status": answer.status, "headers": encoded(headers)}
    await send(connection, start)
    await send(connection, {"type": "http.response.body", "body": content})
    return answer.status


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """As ASGI has them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def send(connection: Connection, message: Message) -> None:
    """Wait for a slow reader, and not for ever."""
    try:
        async with asyncio.timeout(STALLED_S):
            await connection.send(message)
    except (TimeoutError, OSError):
        raise ClientGone from None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
