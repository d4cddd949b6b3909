"""Which version has a receipt, which waits for one, and whether anybody may generate without? Only the event loop calls. Torch-free.

    update passes → the weights are settled → canaries are asked, beside the traffic → CONFIRMED, MISSED, INCONCLUSIVE

All calls that change weights pass here, so a receipt is never of two versions: one that is being taken when the next change
begins is thrown away. Nobody waits for a receipt but, where it is required, a request that generates.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, Protocol

from zerodrift.core.errors import NoReceipt
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.shadow.figures import ShadowFigures
from zerodrift.serve.shadow.scorer import Job
from zerodrift.serve.shadow.versions import EngineVersions, RequestPassage

log = logging.getLogger("zerodrift.serve")
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""After an engine that could not be asked about its canaries; twice as long each time."""
READY_S = 30.0
"""That the first control call waits for what the engine says before it."""


NOTED, OVERTAKEN, UNREAD, UNASKED, FAILED = "noted", "overtaken", "unread", "unasked", "failed"
"""Beside those of a receipt: what can become of one that is owed."""


class ReceiptState(StrEnum):
    """Of the weights that the engine has now."""

    STARTED = "started"
    """Those that it was started with: no update has passed, and there is nothing that a receipt could be of."""
    PENDING = "pending"
    CONFIRMED = "confirmed"
    MISSED = "missed"
    INCONCLUSIVE = "inconclusive"


class Overtaken(Exception):
    """Weights may have changed while the engine was asked."""


class CanariesUnasked(Exception):
    """The engine could not be asked, and may be able to later."""


class ReceiptDue(NamedTuple):
    """What one receipt is to be of."""

    version: int
    label: str | None
    """As the trainer called it; None: it did not, and the engine's own label says nothing."""
    salt: str
    """What nothing in the engine's cache was written under."""
    is_current: Callable[[], bool]
    """Whether no weights may have changed since. Any thread."""
    first: bool
    """No update has passed yet."""


class TakenReceipt(NamedTuple):
    """What came of it."""

    state: ReceiptState
    id: str
    message: str
    cause: str | None = None


class TakesReceipts(Protocol):
    """Both sides, asked in a thread that may take its time."""

    def take(self, due: ReceiptDue) -> TakenReceipt | None:
        """A receipt of the weights that the reference holds; None where it was only noted what the engine says before the
        first update. Raises Overtaken, and CanariesUnasked."""
        ...

    def leave_open(self, due: ReceiptDue, why: str) -> TakenReceipt | None:
        """A receipt which says that none could be taken; None where not even that."""
        ...


class ShadowReceipts:
    """Of one engine."""

    def __init__(
        self,
        versions: EngineVersions,
        taker: TakesReceipts,
        enqueue: Callable[[Job], None],
        figures: ShadowFigures,
        *,
        required: bool,
    ) -> None:
        """`enqueue`: behind the changes of the reference, in its thread. It begins with what the engine says now."""
        self._versions, self._taker, self._enqueue, self._figures = versions, taker, enqueue, figures
        self._required = required
        self._loop = asyncio.get_running_loop()
        self._tried, self._news = asyncio.Event(), asyncio.Event()
        self._epoch = 0
        """Grows with every call that may change weights or their label, and with every pause."""
        self._asked: int | None = None
        """Epoch of what was asked last."""
        self._retry_s = RETRY_S
        self._label: str | None
        self._state: ReceiptState
        self._last: TakenReceipt | None
        self._owed = True
        self._owe(ReceiptState.STARTED, None)
        self.look()

    async def ready(self) -> None:
        """Until it is known what the engine said before the first update, which has nothing to be held against otherwise."""
        if not (self._owed and self._state is ReceiptState.STARTED and self._is_settled):
            return
        if self._tried.is_set():
            # It was not there when it was asked last, and may be now.
            self._again(self._epoch)
        try:
            async with asyncio.timeout(READY_S):
                await self._tried.wait()
        except TimeoutError:
            log.warning("in %g s the engine did not say what it is before the first update", READY_S)

    def begin(self) -> None:
        """From here on weights may change, or nothing is answered: a receipt that is being taken would be of neither version."""
        self._epoch += 1
        self._retry_s = RETRY_S

    def changed(self, label: str | None) -> None:
        """They may have changed, or have another label."""
        self._owe(ReceiptState.PENDING, label)

    def look(self) -> None:
        """After anything changed in `versions`: can what is owed be taken now?"""
        if self._owed and self._asked != self._epoch and self._is_settled:
            self._ask()
        self._news.set()

    def told(self, passage: RequestPassage) -> str:
        """As the response header has it."""
        if passage.is_mixed or passage.last != self._versions.number:
            return "none"
        return f"{self._state} {self._last.id}" if self._last is not None else str(self._state)

    async def admit(self) -> None:
        """Until a request may generate; refused where it would wait for ever."""
        while not self.lets_in:
            if self._is_settled and self._state in (ReceiptState.MISSED, ReceiptState.INCONCLUSIVE):
                raise self._refusal()
            self._news.clear()
            await self._news.wait()

    @property
    def lets_in(self) -> bool:
        """Whether a request may generate now."""
        return not self._required or (
            self._is_settled and self._state in (ReceiptState.STARTED, ReceiptState.CONFIRMED)
        )

    @property
    def _is_settled(self) -> bool:
        return not (self._versions.changing or self._versions.paused)

    def _refusal(self) -> CallRefused:
        says = "none could be taken, see the log"
        if (last := self._last) is not None:
            says = f"{last.cause + ': ' if last.cause else ''}{last.message}; receipt {last.id[:16]}"
        return CallRefused(
            424,
            f"no receipt vouches for the weights of the engine, and --require-receipt lets nobody generate by them: {self._state} "
            f"({says}). Send the update again under another label, or another label alone (/update_weight_version) to have them measured again",
            code=NoReceipt.code,
        )

    def _owe(self, state: ReceiptState, label: str | None) -> None:
        self._owed, self._label = True, label
        self._become(state, None)

    def _become(self, state: ReceiptState, last: TakenReceipt | None) -> None:
        self._state, self._last = state, last
        self._figures.confirmed = state is ReceiptState.CONFIRMED
        self._news.set()

    def _ask(self) -> None:
        epoch, versions = self._epoch, self._versions
        self._asked = epoch
        self._tried.clear()
        first = self._state is ReceiptState.STARTED
        due = ReceiptDue(
            versions.number, self._label, versions.fresh_salt(), lambda: self._epoch == epoch, first
        )
        # One that could not be asked is told of once, however often it is tried again.
        again = self._state is ReceiptState.INCONCLUSIVE

        def job(held: int | None) -> None:
            outcome, taken = _taken(self._taker, due, held, again=again)
            # Nobody is left to hear of it.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._note, epoch, outcome, taken)

        self._enqueue(job)

    def _note(self, epoch: int, outcome: str, taken: TakenReceipt | None) -> None:
        if outcome != NOTED:
            self._figures.receipts[outcome] += 1
        if epoch != self._epoch:
            return
        self._tried.set()
        if outcome == UNASKED:
            self._loop.call_later(self._retry_s, self._again, epoch)
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
        else:
            self._owed = False
        if self._state is ReceiptState.STARTED:
            return
        if taken is not None:
            self._become(taken.state, taken)
        elif self._state is ReceiptState.PENDING:
            self._become(ReceiptState.INCONCLUSIVE, None)

    def _again(self, epoch: int) -> None:
        if epoch == self._epoch and self._tried.is_set():
            self._asked = None
            self.look()


def _taken(
    taker: TakesReceipts, due: ReceiptDue, held: int | None, *, again: bool
) -> tuple[str, TakenReceipt | None]:
    """In the thread of the reference: a word for the metrics, and what came of it."""
    try:
        if not due.is_current():
            return OVERTAKEN, None
        if not due.first and held != due.version:
            return UNREAD, taker.leave_open(
                due,
                "the proxy does not know the weights: they came in a way that it cannot read, or the call failed",
            )
        try:
            found = taker.take(due)
        except CanariesUnasked as error:
            log.warning("no receipt of version %d could be taken: %s", due.version, error)
            told = due.first or again
            return UNASKED, None if told else taker.leave_open(due, f"the engine could not be asked: {error}")
    except Overtaken:
        return OVERTAKEN, None
    except Exception:
        # The traffic goes on, and every answer says that nothing vouches for it.
        log.exception("no receipt of version %d could be taken", due.version)
        return FAILED, None
    return (NOTED, None) if found is None else (str(found.state), found)
