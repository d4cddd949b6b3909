"""From a connection to the engine and back, as a plain ASGI application. Torch-free.

What passes is what was sent, but for the salt of its cache; what comes back is what the engine said, and one header more.
Where the engine says nothing, the answer is an error under a name: 502 or 504 for what may be asked again, and 424 for a
control call that the engine may have carried out, because clients re-send on 5xx by themselves.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerodrift.backends import sse
from zerodrift.serve.access import ServeAccess
from zerodrift.serve.call import DONE, CallReply
from zerodrift.serve.connection import (
    Bodies,
    ClientGone,
    Connection,
    HeldBody,
    Receive,
    Send,
    caller_of,
    check_crowd,
    reply,
    send,
    told,
    unless_left,
)
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.limits import LARGE_BODY_BYTES, QUERY_BYTES, ServeLimits
from zerodrift.serve.routes import Level, ServedRoute
from zerodrift.serve.shadow.chosen import ChosenCall
from zerodrift.serve.shadow.control import Forwarded, ShadowControl
from zerodrift.serve.shadow.drain import Drain
from zerodrift.serve.shadow.figures import ShadowFigures
from zerodrift.serve.shadow.receipts import ShadowReceipts
from zerodrift.serve.shadow.routes import BY_PATH, GENERATE, PASS
from zerodrift.serve.shadow.salted import salted
from zerodrift.serve.shadow.scorer import ShadowScorer
from zerodrift.serve.shadow.upstream import Headers, Upstream, UpstreamAnswer, UpstreamFailed
from zerodrift.serve.shadow.versions import EngineVersions, RequestPassage

log = logging.getLogger("zerodrift.serve")
VERSION, RECEIPT = b"x-zerodrift-weight-version", b"x-zerodrift-receipt"
METRICS_S = 5.0
ASKED_S = 30.0
"""For what neither generates nor changes anything."""
_EVENTS, _JSON, _TEXT = sse.MEDIA.encode(), b"application/json", "text/plain; version=0.0.4; charset=utf-8"


@dataclass(eq=False)
class PassedCall:
    """A call that was let in."""

    route: ServedRoute
    query: bytes
    headers: Headers
    body: HeldBody

    @property
    def target(self) -> bytes:
        """As it is asked of the engine."""
        return self.route.path.encode() + (b"?" + self.query if self.query else b"")


class ShadowParts(NamedTuple):
    """What a proxy is made of."""

    upstream: Upstream
    versions: EngineVersions
    drain: Drain
    control: ShadowControl
    scorer: ShadowScorer | None
    figures: ShadowFigures
    receipts: ShadowReceipts | None = None


class ShadowApp:
    """Passes calls to one engine."""

    def __init__(self, access: ServeAccess, limits: ServeLimits, parts: ShadowParts) -> None:
        self._access, self._limits, self._parts = access, limits, parts
        self._figures = parts.figures
        self._bodies = Bodies(limits)
        self._looking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        begun, status = time.monotonic(), 499
        path = scope["raw_path"].decode("latin-1")
        try:
            status = await self._answer(Connection(scope, receive, send), path)
        except ClientGone:
            self._figures.disconnects += 1
            if (abort := scope.get("zerodrift.abort")) is not None:
                abort()
        finally:
            known = path if path in BY_PATH else "unknown"
            self._figures.answered(known, status, time.monotonic() - begun)

    async def _answer(self, connection: Connection, path: str) -> int:
        try:
            route = self._access.admit(caller_of(connection.scope, path))
            check_crowd(connection, route.level)
            async with self._bodies.read(connection, takes=route.body is not None) as body:
                work = asyncio.create_task(self._handled(connection, self._asked(connection, route, body)))
                if route.level is Level.ADMIN:
                    return await asyncio.shield(work)
                return await unless_left(connection, work)
        except CallRefused as refusal:
            # What was not read would be taken for the next call.
            return await reply(connection, told(refusal), close=True)

    def _asked(self, connection: Connection, route: ServedRoute, body: HeldBody) -> PassedCall:
        query = connection.scope["query_string"]
        if len(query) > QUERY_BYTES:
            raise CallRefused(414, f"a query has at most {QUERY_BYTES} bytes", code="limit")
        headers = list(connection.scope["headers"])
        # A token of ours says nothing to the engine, and is not to be read in its log.
        ours = [
            name == b"authorization" and self._access.is_ours(value.decode("latin-1"))
            for name, value in headers
        ]
        kept = [pair for pair, is_ours in zip(headers, ours, strict=True) if not is_ours]
        return PassedCall(route, query, kept, body)

    async def _handled(self, connection: Connection, asked: PassedCall) -> int:
        handler = asked.route.handler
        try:
            async with asyncio.timeout(self._limit_s(asked.route)) as limit:
                if handler == GENERATE:
                    return await self._generate(connection, asked, limit)
                if handler == "metrics":
                    return await reply(connection, await self._metrics(asked))
                if handler == PASS:
                    found = await self._forward(asked)
                else:
                    found = await self._parts.control.handle(
                        handler, asked.body.content, asked.query, lambda: self._forward(asked)
                    )
        except (CallRefused, UpstreamFailed, TimeoutError) as error:
            return await reply(connection, told(self._refusal(error, asked.route)))
        return await _whole(connection, found, [])

    def _limit_s(self, route: ServedRoute) -> float:
        """A probe must not wait as long as a rollout: a vLLM whose front end was killed still takes connections."""
        if route.handler == GENERATE or route.level is Level.ADMIN:
            return self._limits.request_s
        return min(ASKED_S, self._limits.request_s)

    async def _generate(self, connection: Connection, asked: PassedCall, limit: asyncio.Timeout) -> int:
        parts = self._parts
        passage = await self._admitted()
        chosen = None
        try:
            asked.body.content = await _salted(asked.body.content, parts.versions, passage)
            if parts.scorer is not None:
                chosen = parts.scorer.choose(asked.route.path, asked.body.content)
            async with self._exchange(asked) as answer:
                if answer.media == _EVENTS:
                    # Its end is told in the stream.
                    end = limit.when()
                    limit.reschedule(None)
                    async with self._told_in(connection, asked.route, end):
                        await self._stream(connection, answer, passage, chosen)
                    return answer.status
                if answer.status == 200 and answer.media != _JSON:
                    raise UpstreamFailed(
                        "upstream/nonsense",
                        f"the engine answered a request with {answer.media[:80]!r}, which is neither JSON nor a stream of events",
                        sent=True,
                    )
                found = Forwarded(answer.status, answer.headers, await answer.whole())
            if chosen is not None:
                chosen.add(found.content)
                self._offer(chosen, answer, passage)
        finally:
            if chosen is not None:
                chosen.forget()
            self._left(passage)
        return await _whole(connection, found, self._says(passage))

    async def _admitted(self) -> RequestPassage:
        receipts, drain = self._parts.receipts, self._parts.drain
        while True:
            if receipts is not None:
                await receipts.admit()
            passage = await drain.admit()
            if receipts is None or receipts.lets_in:
                return passage
            # Weights changed while it waited for those before.
            drain.leave(passage)

    def _says(self, passage: RequestPassage) -> list[tuple[bytes, bytes]]:
        """Headers of an answer that generates."""
        found = [(VERSION, passage.told.encode())]
        if (receipts := self._parts.receipts) is not None:
            found.append((RECEIPT, receipts.told(passage).encode()))
        return found

    async def _stream(
        self,
        connection: Connection,
        answer: UpstreamAnswer,
        passage: RequestPassage,
        chosen: ChosenCall | None,
    ) -> None:
        """Each piece as it comes; of those that are to be scored a copy is kept."""
        headers = [*answer.headers, *self._says(passage)]
        await send(connection, {"type": "http.response.start", "status": answer.status, "headers": headers})
        async for piece in answer.pieces:
            if chosen is not None:
                chosen.add(piece)
            await send(connection, {"type": "http.response.body", "body": piece, "more_body": True})
        await send(connection, {"type": "http.response.body", "body": b"", "more_body": False})
        if chosen is not None:
            self._offer(chosen, answer, passage)

    @asynccontextmanager
    async def _told_in(
        self, connection: Connection, route: ServedRoute, end: float | None
    ) -> AsyncIterator[None]:
        """What goes wrong behind the head of a stream: the status is out, so it is told where the next tokens would have been,
        behind whatever line was cut."""
        found: Exception | None = None
        try:
            async with asyncio.timeout_at(end):
                yield
        except (UpstreamFailed, TimeoutError) as error:
            found = error
        if found is not None:
            body = b"\n\ndata: " + self._refusal(found, route).body + b"\n\n" + DONE
            await send(connection, {"type": "http.response.body", "body": body, "more_body": False})
        if isinstance(found, UpstreamFailed):
            self._note(found)

    def _left(self, passage: RequestPassage) -> None:
        self._parts.drain.leave(passage)
        self._figures.mixed += passage.is_mixed

    def _offer(self, chosen: ChosenCall, answer: UpstreamAnswer, passage: RequestPassage) -> None:
        assert self._parts.scorer is not None, "an answer was chosen and nobody scores"
        if answer.status != 200:
            return
        if passage.is_mixed:
            self._figures.mismatch.leave_out("mixed")
        else:
            self._parts.scorer.offer(chosen, passage.last, streamed=answer.media == _EVENTS)

    async def _forward(self, asked: PassedCall) -> Forwarded:
        async with self._exchange(asked) as answer:
            return Forwarded(answer.status, answer.headers, await answer.whole())

    async def _metrics(self, asked: PassedCall) -> CallReply:
        """The engine's page as plain text, and ours behind it; ours alone where there is none."""
        page = b""
        try:
            # Prometheus gives up after ten seconds.
            async with asyncio.timeout(METRICS_S):
                found = await self._forward(replace(asked, headers=[(b"accept", b"text/plain")]))
            page = found.content if found.status == 200 else b""
        except (UpstreamFailed, TimeoutError) as error:
            log.warning("the engine's metrics are not there: %s", error)
        own = self._figures.lines(self._parts.versions).encode()
        return CallReply(page + (b"" if page.endswith(b"\n") or not page else b"\n") + own, media=_TEXT)

    @asynccontextmanager
    async def _exchange(self, asked: PassedCall) -> AsyncIterator[UpstreamAnswer]:
        try:
            async with self._parts.upstream.exchange(
                asked.route.method, asked.target, asked.headers, asked.body.content, asked.body.let_go
            ) as answer:
                self._figures.up = True
                yield answer
        except UpstreamFailed as error:
            self._note(error)
            raise

    def _note(self, error: UpstreamFailed) -> None:
        figures = self._figures
        figures.failures[error.code] += 1
        # One that was never there has lost nothing.
        if error.code == "upstream/unreachable" and figures.up:
            figures.up = False
            log.warning("the engine is gone: %s", error)
            self._parts.control.lose()
        if error.code == "upstream/broken" and self._looking is None:
            # An answer that was cut is no proof: whether the engine is gone, the next connection says.
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            async with self._parts.upstream.exchange("GET", b"/health", [], b"") as answer:
                await answer.whole()
        except UpstreamFailed as error:
            if error.code == "upstream/unreachable":
                self._note(error)
        finally:
            self._looking = None

    def _refusal(self, error: Exception, route: ServedRoute) -> CallRefused:
        if isinstance(error, CallRefused):
            return error
        failed = isinstance(error, UpstreamFailed)
        code = error.code if isinstance(error, UpstreamFailed) else "upstream/timeout"
        said = str(error) if failed else f"the engine did not answer within {self._limit_s(route):g} s"
        if route.level is Level.ADMIN and (not isinstance(error, UpstreamFailed) or error.sent):
            return CallRefused(
                424,
                f"{said}; whether it did what was asked is not known: ask it before you ask again",
                code=code,
            )
        return CallRefused(502 if failed else 504, said, code=code)


async def _salted(content: bytes, versions: EngineVersions, passage: RequestPassage) -> bytes:
    def made() -> bytes:
        return salted(content, lambda own: versions.salt(passage, own))

    return await asyncio.to_thread(made) if len(content) > LARGE_BODY_BYTES else made()


async def _whole(connection: Connection, found: Forwarded, more: list[tuple[bytes, bytes]]) -> int:
    """As the engine said it, with its own length."""
    headers = [pair for pair in found.headers if pair[0].lower() != b"content-length"]
    headers += [(b"content-length", str(len(found.content)).encode()), *more]
    await send(connection, {"type": "http.response.start", "status": found.status, "headers": headers})
    await send(connection, {"type": "http.response.body", "body": found.content})
    return found.status
