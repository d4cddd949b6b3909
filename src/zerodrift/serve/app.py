"""From a connection to a handler and back, as a plain ASGI application. Torch-free.

No framework: routes are exact paths of a table, so there is nothing to match, and every size is checked before it is
read. A handler of an inference route is cancelled when its client leaves; one of a control route runs to its end.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from zerodrift.serve.access import Caller, ServeAccess
from zerodrift.serve.call import DONE, JSON, Call, CallReply, EventStream, Handler
from zerodrift.serve.errors import CallRefused, refusal_of
from zerodrift.serve.figures import Figures
from zerodrift.serve.limits import (
    BODY_S,
    LARGE_BODY_BYTES,
    NO_BODY_BYTES,
    QUERY_BYTES,
    STALLED_S,
    ServeLimits,
)
from zerodrift.serve.routes import BY_PATH, Level, ServedRoute
from zerodrift.serve.wire import read_body

Message = MutableMapping[str, Any]
Send = Callable[[Message], Any]
Receive = Callable[[], Any]
log = logging.getLogger("zerodrift.serve")
_COMMON = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class ClientGone(Exception):
    """Nobody is left to answer."""


class Connection(NamedTuple):
    """What ASGI gives for one call."""

    scope: Mapping[str, Any]
    receive: Receive
    send: Send


class App:
    """Answers calls by the handlers that it is given, by their names in the route table."""

    def __init__(self, access: ServeAccess, limits: ServeLimits, figures: Figures) -> None:
        """`handlers` are set when the engine is there."""
        self._access, self._limits, self._figures = access, limits, figures
        self.handlers: Mapping[str, Handler] = {}
        self._reading = 0
        """Bytes of bodies that are held now."""

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        connection = Connection(scope, receive, send)
        begun, where = time.monotonic(), uuid.uuid4().hex[:12]
        path = scope["raw_path"].decode("latin-1")
        status = 499
        try:
            status = await self._answer(connection, path, where)
        except ClientGone:
            self._figures.disconnects += 1
            if (abort := scope.get("zerodrift.abort")) is not None:
                abort()
        finally:
            known = path if path in BY_PATH else "unknown"
            self._figures.answered(known, status, time.monotonic() - begun)
            log.debug("%s %s %s %s", where, scope["method"], known, status)

    async def _answer(self, connection: Connection, path: str, where: str) -> int:
        try:
            route = self._access.admit(_caller(connection.scope, path))
            async with self._body(connection, route) as content:
                query = _query_of(route, connection.scope["query_string"])
                large = len(content) > LARGE_BODY_BYTES
                body = (
                    await asyncio.to_thread(_body_of, route, content) if large else _body_of(route, content)
                )
                call = Call(route, body, query)
        except CallRefused as refusal:
            # What was not read would be taken for the next call.
            return await _reply(connection, _told(refusal), close=True)
        return await self._handled(connection, call, where)

    async def _handled(self, connection: Connection, call: Call, where: str) -> int:
        """The handler and the client, whoever ends first."""
        work = asyncio.create_task(self._respond(connection, call, where))
        if call.route.level is Level.ADMIN:
            return await asyncio.shield(work)
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

    async def _respond(self, connection: Connection, call: Call, where: str) -> int:
        # What a control call has begun goes on whoever waits for it, so it is waited for.
        limited = call.route.level is not Level.ADMIN
        end = asyncio.get_running_loop().time() + self._limits.request_s if limited else None
        try:
            async with asyncio.timeout_at(end):
                found = await self.handlers[call.route.handler](call)
            if not isinstance(found, EventStream):
                found = found._replace(content=found.encoded)
        except Exception as error:
            found = _told(self._refusal(error, call, where))
        if isinstance(found, EventStream):
            return await self._stream(connection, found, end, lambda error: self._refusal(error, call, where))
        return await _reply(connection, found)

    def _refusal(self, error: Exception, call: Call, where: str) -> CallRefused:
        if isinstance(error, TimeoutError):
            return CallRefused(408, f"no answer within {self._limits.request_s:g} s; the request was ended")
        refusal = refusal_of(error, where)
        if refusal.status >= 500:
            log.error("%s %s", where, call.route.path, exc_info=error)
        return refusal

    async def _stream(
        self,
        connection: Connection,
        events: EventStream,
        end: float | None,
        refused: Callable[[Exception], CallRefused],
    ) -> int:
        await _send(
            connection,
            {
                "type": "http.response.start",
                "status": 200,
                "headers": _headers({"content-type": "text/event-stream; charset=utf-8", **_COMMON}),
            },
        )
        try:
            async with asyncio.timeout_at(end):
                async for piece in events.pieces:
                    await _send(connection, {"type": "http.response.body", "body": piece, "more_body": True})
        except ClientGone:
            raise
        except Exception as error:
            # The status is out already: told where the next tokens would have been.
            told = b"data: " + refused(error).body + b"\n\n" + DONE
            await _send(connection, {"type": "http.response.body", "body": told, "more_body": True})
        finally:
            # Of a stream that nobody reads to its end: what it holds is let go now, and not when it is collected.
            await events.pieces.aclose()  # type: ignore[attr-defined]
        await _send(connection, {"type": "http.response.body", "body": b"", "more_body": False})
        return 200

    @asynccontextmanager
    async def _body(self, connection: Connection, route: ServedRoute) -> AsyncIterator[bytes]:
        headers = dict(connection.scope["headers"])
        promised = headers.get(b"content-length", b"")
        # Anybody may call some of the routes without a body, and must not hold the memory of those with one.
        most = self._limits.body_bytes if route.body is not None else NO_BODY_BYTES
        if promised and (not promised.isdigit() or len(promised) > 18 or int(promised) > most):
            raise CallRefused(413, f"a body has at most {most} bytes", code="limit")
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                more = True
                while more:
                    message = await connection.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece, more = message.get("body", b""), message.get("more_body", False)
                    self._check_size(len(content) + len(piece), len(piece), most)
                    content += piece
                    self._reading += len(piece)
            media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if content and media != b"application/json":
                raise CallRefused(
                    415, "a body is JSON, and says so: Content-Type: application/json", code="body/media"
                )
            yield bytes(content)
        except TimeoutError:
            raise CallRefused(408, f"the body did not come within {BODY_S:g} s", code="timeout") from None
        finally:
            self._reading -= len(content)

    def _check_size(self, length: int, new: int, most: int) -> None:
        if length > most:
            raise CallRefused(413, f"a body has at most {most} bytes", code="limit")
        if self._reading + new > self._limits.bodies_bytes:
            raise CallRefused(
                429,
                "too many large bodies are being read; come again",
                code="limit",
                headers={"retry-after": "1"},
            )


def _caller(scope: Mapping[str, Any], path: str) -> Caller:
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    host, port = scope.get("server") or ("", None)
    return Caller(scope["method"], path, headers, str(host), port)


def _body_of(route: ServedRoute, content: bytes) -> Any:
    if route.body is None:
        if content.strip() not in (b"", b"{}", b"null"):
            raise CallRefused(400, "this route takes no body", code="body/unknown-field")
        return None
    if not content and not route.body_optional:
        raise CallRefused(400, "this route needs a JSON body; /openapi.json says which", code="body/missing")
    if route.body_optional and content.strip() == b"null":
        content = b""
    return read_body(content, route.body)


def _query_of(route: ServedRoute, query: bytes) -> Any:
    if len(query) > QUERY_BYTES:
        raise CallRefused(414, f"a query has at most {QUERY_BYTES} bytes", code="limit")
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=32) if query else []
    except ValueError as error:
        raise CallRefused(400, f"the query cannot be read: {error}", code="query/invalid") from error
    told = dict(pairs)
    if len(told) != len(pairs):
        raise CallRefused(400, "a name stands twice in the query", code="query/twice")
    if route.query is None:
        if told:
            raise CallRefused(
                400, f"{next(iter(told))[:80]!r} is nothing that this route takes", code="query/unknown"
            )
        return None
    try:
        return msgspec.convert(told, route.query, strict=False)
    except msgspec.ValidationError as error:
        raise CallRefused(
            400, f"the query cannot be read: {str(error)[:300]}", code="query/invalid"
        ) from error


def _told(refusal: CallRefused) -> CallReply:
    return CallReply(refusal.body, refusal.status, JSON, refusal.headers)


async def _reply(connection: Connection, reply: CallReply, *, close: bool = False) -> int:
    content = reply.encoded
    headers = {"content-type": reply.media, "content-length": str(len(content)), **_COMMON, **reply.headers}
    if close:
        headers["connection"] = "close"
    start = {"type": "http.response.start", "status": reply.status, "headers": _headers(headers)}
    await _send(connection, start)
    await _send(connection, {"type": "http.response.body", "body": content})
    return reply.status


def _headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def _send(connection: Connection, message: Message) -> None:
    """Wait for a slow reader, and not for ever."""
    try:
        async with asyncio.timeout(STALLED_S):
            await connection.send(message)
    except (TimeoutError, OSError):
        raise ClientGone from None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
