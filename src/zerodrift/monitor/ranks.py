"""Several ranks as one monitor: each sends what it read, and by what it judges; all decide alike, or all raise alike.

A rank that cannot read its batch sends why, and takes part all the same: one that raised by itself would leave the others
waiting for it in a collective that never ends. What ranks remember may differ after a restart, where a kill came between two
writes or the first rank alone has a file, and after calls on one of them. Then all go on from the one that has seen most, of those
the one that is worst off, and what was read by another state is read again.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import add
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from zerodrift.core.errors import RanksDisagree
from zerodrift.monitor.batch import BatchSums
from zerodrift.monitor.decide import Settings
from zerodrift.monitor.metrics import LEVELS
from zerodrift.monitor.state import MonitorState

logger = logging.getLogger("zerodrift.monitor")

Gather = Callable[[bytes], Iterable[bytes]]
T = TypeVar("T")


class Read(NamedTuple):
    """One batch, read and not yet judged."""

    step: int
    trainer_version: int | None
    sums: BatchSums


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank sends."""

    settings: str
    """Digest of what does not change from step to step."""
    state: str
    """Digest of what it remembers."""
    found: Read | None = None
    refused: str = ""
    """Why it cannot read its batch, where it has found nothing."""


def over_ranks(
    gather: Gather, settings: Settings, state: MonitorState, read: Callable[[MonitorState], Read]
) -> tuple[MonitorState, Read]:
    """The batch of all ranks, and the state that all judge it by. `read` makes this rank's part of it."""
    part, failed = _part(settings, state, read)
    parts = _exchanged(gather, part, Part)
    if len({each.settings for each in parts}) > 1:
        raise RanksDisagree("ranks have different settings: give their monitors the same, and one baseline")
    if len({each.state for each in parts}) > 1:
        state = _agreed(state, _exchanged(gather, state, MonitorState))
        part, failed = _part(settings, state, read)
        parts = _exchanged(gather, part, Part)
        if len({each.state for each in parts}) > 1:
            raise RanksDisagree(
                "ranks cannot agree on what they remember: gather gives the same parts in one order to all"
            )
    if failed is not None:
        raise failed
    return state, _together(parts)


def _part(
    settings: Settings, state: MonitorState, read: Callable[[MonitorState], Read]
) -> tuple[Part, Exception | None]:
    """This rank's, and why it is none."""
    by = partial(Part, settings=_digest(settings), state=_digest(state))
    try:
        part = by(found=read(state))
        msgspec.json.encode(part)  # what cannot be sent must not raise while the others wait
    # A correction of the user's may raise anything.
    except Exception as error:
        return by(refused=_sendable(str(error) or type(error).__name__)), error
    return part, None


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _together(parts: Sequence[Part]) -> Read:
    found = [part.found for part in parts if part.found is not None]
    if len(found) < len(parts):
        refused = [f"rank {rank}: {part.refused}" for rank, part in enumerate(parts) if part.found is None]
        raise RanksDisagree(
            f"no rank has judged this batch, since one cannot read its part of it; {'; '.join(refused)}"
        )
    step = _same("step", [each.step for each in found])
    assert step is not None
    version = _same("trainer_version", [each.trainer_version for each in found])
    return Read(step, version, reduce(add, (each.sums for each in found)))


def _same(name: str, values: Sequence[int | None]) -> int | None:
    """Of all that know it."""
    known = {value for value in values if value is not None}
    if len(known) > 1:
        told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        raise RanksDisagree(f"{name} is {told}; no rank has judged this batch: all must speak of the same")
    return next(iter(known), None)


def _agreed(mine: MonitorState, states: Sequence[MonitorState]) -> MonitorState:
    """That of the rank that has seen most; a halt that it shares with nobody is not lost."""
    rank = max(
        range(len(states)),
        key=lambda rank: (states[rank].observed, LEVELS[states[rank].breaker.state], -rank),
    )
    if states[rank] != mine:
        logger.warning(
            "ranks remember different things; this one goes on from what rank %d remembers, after %d batches",
            rank,
            states[rank].observed,
        )
    return states[rank]


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(value))


def _exchanged(gather: Gather, mine: T, kind: type[T]) -> list[T]:
    sent = msgspec.json.encode(mine)
    try:
        parts = [bytes(part) for part in gather(sent)]
        found = [msgspec.json.decode(part, type=kind) for part in parts]
    except (TypeError, msgspec.MsgspecError) as error:
        raise RanksDisagree(
            f"gather brought something else than what ranks of this version send ({error}); it gives everybody's bytes as they are"
        ) from error
    if sent not in parts:
        raise RanksDisagree(
            f"gather brought {len(parts)} parts, and not this rank's own among them; it gives everybody's bytes"
        )
    return found
