"""From a connection to a handler and back, as a plain ASGI application. Torch-free.

No framework: routes are exact paths of a table, so there is nothing to match, and every size is checked before it is
read. A handler of an inference route is cancelled when its client leaves; one of a control route runs to its end.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from zerodrift.serve.access import ServeAccess
from zerodrift.serve.call import DONE, Call, EventStream, Handler
from zerodrift.serve.connection import (
    COMMON,
    Bodies,
    ClientGone,
    Connection,
    Receive,
    Send,
    caller_of,
    check_crowd,
    encoded,
    reply,
    send,
    told,
    unless_left,
)
from zerodrift.serve.errors import CallRefused, refusal_of
from zerodrift.serve.figures import Figures
from zerodrift.serve.limits import LARGE_BODY_BYTES, QUERY_BYTES, ServeLimits
from zerodrift.serve.routes import BY_PATH, Level, ServedRoute
from zerodrift.serve.wire import read_body

log = logging.getLogger("zerodrift.serve")


class App:
    """Answers calls by the handlers that it is given, by their names in the route table."""

    def __init__(self, access: ServeAccess, limits: ServeLimits, figures: Figures) -> None:
        """`handlers` are set when the engine is there."""
        self._access, self._limits, self._figures = access, limits, figures
        self.handlers: Mapping[str, Handler] = {}
        self._bodies = Bodies(limits)

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
            route = self._access.admit(caller_of(connection.scope, path))
            check_crowd(connection, route.level)
            async with self._bodies.read(connection, takes=route.body is not None) as held:
                query = _query_of(route, connection.scope["query_string"])
                large = len(held.content) > LARGE_BODY_BYTES
                body = (
                    await asyncio.to_thread(_body_of, route, held.content)
                    if large
                    else _body_of(route, held.content)
                )
                # What was made of it is counted as what it was, until it is queued.
                held.content = b""
                return await self._handled(connection, Call(route, body, query, held.let_go), where)
        except CallRefused as refusal:
            # What was not read would be taken for the next call.
            return await reply(connection, told(refusal), close=True)

    async def _handled(self, connection: Connection, call: Call, where: str) -> int:
        """The handler and the client, whoever ends first."""
        work = asyncio.create_task(self._respond(connection, call, where))
        if call.route.level is Level.ADMIN:
            return await asyncio.shield(work)
        return await unless_left(connection, work)

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
            found = told(self._refusal(error, call, where))
        if isinstance(found, EventStream):
            return await self._stream(connection, found, end, lambda error: self._refusal(error, call, where))
        return await reply(connection, found)

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
        await send(
            connection,
            {
                "type": "http.response.start",
                "status": 200,
                "headers": encoded({"content-type": "text/event-stream; charset=utf-8", **COMMON}),
            },
        )
        try:
            async with asyncio.timeout_at(end):
                async for piece in events.pieces:
                    await send(connection, {"type": "http.response.body", "body": piece, "more_body": True})
        except ClientGone:
            raise
        except Exception as error:
            # The status is out already: told where the next tokens would have been.
            told = b"data: " + refused(error).body + b"\n\n" + DONE
            await send(connection, {"type": "http.response.body", "body": told, "more_body": True})
        finally:
            # Of a stream that nobody reads to its end: what it holds is let go now, and not when it is collected.
            await events.pieces.aclose()  # type: ignore[attr-defined]
        await send(connection, {"type": "http.response.body", "body": b"", "more_body": False})
        return 200


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
