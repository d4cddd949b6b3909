"""Control calls on their way to the engine: when does a version end, and which weights does the next one have? Torch-free.

    start → update (one or several) → finish        one new version, at the end
    update without a start, collective_rpc          one new version each
    a label, an adapter                             one new version each, with the weights that were there

A call that failed counts as well: what an engine has taken of an update that it refused is not known. The answer to a call
that names a directory is given when both sides have read it, since a trainer may write the next one there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from zerodrift.core.errors import ZerodriftError
from zerodrift.serve.shadow.drain import Drain
from zerodrift.serve.shadow.figures import ShadowFigures
from zerodrift.serve.shadow.receipts import ShadowReceipts
from zerodrift.serve.shadow.scorer import ShadowScorer, Switch
from zerodrift.serve.shadow.updates import UpdateTold, action_of, told_of
from zerodrift.serve.shadow.upstream import Headers, UpstreamFailed
from zerodrift.serve.shadow.versions import EngineVersions

log = logging.getLogger("zerodrift.serve")
Weights = Mapping[str, Any]
KEEPS = ("relabel", "adapter")
"""Calls that leave the weights of the base as they are."""


class Forwarded(NamedTuple):
    """What the engine answered."""

    status: int
    headers: Headers
    content: bytes

    @property
    def ok(self) -> bool:
        """It did what was asked."""
        return 200 <= self.status < 300


Forward = Callable[[], Awaitable[Forwarded]]


def _keeps_weights(handler: str, content: bytes, query: bytes) -> bool:
    """Checking by `reset` writes zeros, and sleep beyond level 1 throws weights away."""
    if handler == "sleep":
        return parse_qs(query.decode("latin-1")).get("level", ["1"]) == ["1"]
    return action_of(content) in ("checksum", "compare", "snapshot")


class ShadowControl:
    """Of one engine."""

    def __init__(
        self,
        versions: EngineVersions,
        drain: Drain,
        scorer: ShadowScorer | None,
        receipts: ShadowReceipts | None,
        figures: ShadowFigures,
    ) -> None:
        self._versions, self._drain, self._scorer, self._figures = versions, drain, scorer, figures
        self._receipts = receipts
        self._one_by_one = asyncio.Lock()
        self._sent: list[Weights | None] | None = None
        """What came since start_weight_update; None: no update is open."""

    async def handle(self, handler: str, content: bytes, query: bytes, forward: Forward) -> Forwarded:
        """`forward` passes the call on."""
        if handler == "resume":
            answer = await forward()
            if answer.ok:
                self._versions.resume()
                self._look()
            return answer
        if self._receipts is not None:
            await self._receipts.ready()
        if handler == "pause":
            return await self._pause(query, forward)
        if handler in ("checker", "sleep"):
            if _keeps_weights(handler, content, query):
                return await forward()
            handler = "rpc"
        async with self._one_by_one:
            return await self._change(handler, content, forward)

    def lose(self) -> None:
        """The engine is gone, and what it holds when it is back is not known."""
        self._sent = None
        self._versions.lose()
        self._tell(None)
        if self._receipts is not None:
            self._receipts.begin()
        self._owe(None)
        self._look()

    async def _pause(self, query: bytes, forward: Forward) -> Forwarded:
        self._drain.hold()
        if self._receipts is not None:
            self._receipts.begin()
        try:
            # Under the two other modes the engine ends what is in flight by itself.
            if parse_qs(query.decode("latin-1")).get("mode") == ["keep"]:
                await self._drain.empty()
            answer = await forward()
            if answer.ok:
                self._versions.pause()
            return answer
        finally:
            self._drain.let_go()
            self._look()

    async def _change(self, handler: str, content: bytes, forward: Forward) -> Forwarded:
        told = told_of(handler, content)
        if self._sent is None:
            await self._drain.empty()
        self._versions.begin()
        if self._receipts is not None and handler != "adapter":
            self._receipts.begin()
        self._look()
        reading = asyncio.create_task(self._read(told.directory))
        answer: Forwarded | None = None
        try:
            answer = await forward()
            weights = await reading
        except UpstreamFailed as error:
            self._ended(handler, told, ok=False, sent=error.sent, weights=None)
            raise
        except BaseException:
            self._ended(handler, told, ok=False, sent=True, weights=None)
            raise
        self._ended(handler, told, ok=answer.ok, sent=True, weights=weights)
        return answer

    def _ended(
        self, handler: str, told: UpdateTold, *, ok: bool, sent: bool, weights: Weights | None
    ) -> None:
        """What a call has come to."""
        opened = self._sent is not None
        if handler == "start":
            if ok:
                self._sent = []
            self._stay(changed=False)
        elif not sent or (not ok and handler in KEEPS) or (not ok and handler == "finish" and not opened):
            self._stay(changed=False)
        elif handler in KEEPS:
            self._stay(changed=True)
            self._tell(None, keeps=True)
            if handler == "relabel":
                self._owe(told.label)
        elif ok and handler == "update" and self._sent is not None:
            # Of several directories none is the whole of it: no model is held for them.
            self._sent = [None, None] if self._sent else [weights]
            self._stay(changed=False)
        else:
            found = (self._sent or []) if handler == "finish" else [weights]
            self._sent = None
            self._versions.end(changed=True)
            self._tell(found[0] if ok and len(found) == 1 else None)
            self._figures.updates[
                "failed" if not ok else "unread" if len(found) != 1 or found[0] is None else "read"
            ] += 1
            self._owe(told.label)
        self._look()

    def _stay(self, *, changed: bool) -> None:
        """The end of a call, and of the change unless an update is open."""
        self._versions.end(changed=changed)
        if self._sent is not None:
            self._versions.begin()

    def _owe(self, label: str | None) -> None:
        if self._receipts is not None:
            self._receipts.changed(label)

    def _look(self) -> None:
        """After anything changed in `versions`."""
        self._drain.look()
        if self._receipts is not None:
            self._receipts.look()

    def _tell(self, weights: Weights | None, *, keeps: bool = False) -> None:
        if self._scorer is not None:
            self._scorer.switch(Switch(self._versions.number, weights, keeps))

    async def _read(self, directory: str | None) -> Weights | None:
        if self._scorer is None or directory is None:
            return None
        try:
            return await asyncio.to_thread(self._scorer.reference.read, directory)
        except (ZerodriftError, OSError) as error:
            log.warning("an update cannot be read, and its samples are not scored: %s", error)
        except Exception:
            # A second whole model may not fit. The engine has taken the update all the same.
            log.exception("an update could not be read, and its samples are not scored")
        return None
