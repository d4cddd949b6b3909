"""One line for every decision, appended to a file: what a dashboard reads while training runs."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from zerodrift.core.frozen import freeze
from zerodrift.monitor.decision import Decision, NotObservable, Reason, State
from zerodrift.monitor.metrics import GAPS, metrics_of
from zerodrift.records.codec import write_atomically


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one line holds."""

    time: float
    """Seconds since 1970."""
    step: int
    state: State
    train: bool
    reasons: tuple[Reason, ...] = ()
    metrics: Mapping[str, float]
    not_observable: Mapping[str, str] = {}
    """Gaps that the batch could not show, and what would show them."""

    def __post_init__(self) -> None:
        """What was written stays."""
        freeze(self, "metrics", "not_observable")


def line_of(decision: Decision) -> bytes:
    """With its end."""
    gaps = {gap: getattr(decision, gap) for gap in GAPS}
    line = Line(
        time=time.time(),
        step=decision.step,
        state=decision.state,
        train=decision.train,
        reasons=decision.reasons,
        metrics=metrics_of(decision),
        not_observable={gap: view.why for gap, view in gaps.items() if isinstance(view, NotObservable)},
    )
    return msgspec.json.encode(line) + b"\n"


class _Numbered(msgspec.Struct):
    """What is read of a line to know which step it is of."""

    step: int


class StepLog:
    """Opened for each line: it may be moved away under our hands, and there is nothing to close."""

    def __init__(self, path: Path) -> None:
        """What a kill tore off becomes a line of its own, and harms no other."""
        self._path = path
        if path.exists() and path.stat().st_size:
            with path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def append(self, decision: Decision) -> None:
        """One write for the whole line."""
        rest = memoryview(line_of(decision))
        with self._path.open("ab", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]

    def drop_after(self, step: int) -> None:
        """Keep lines up to `step`, and what a kill tore off, which says of no step anything."""
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not _is_after(line, step)]
        if len(kept) < len(lines):
            write_atomically(self._path, b"".join(kept))


def _is_after(line: bytes, step: int) -> bool:
    try:
        return msgspec.json.decode(line, type=_Numbered).step > step
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
