"""One JSON object per step, appended to a file."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from zerodrift.core.frozen import freeze
from zerodrift.integrations.metrics import metrics_of
from zerodrift.monitor.decision import Decision, Reason, State


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one line holds."""

    time: float
    """Seconds since 1970."""
    step: int
    state: State
    train: bool
    reasons: tuple[Reason, ...] = ()
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        """What was written stays."""
        freeze(self, "metrics")


class Jsonl:
    """Appends; what a kill tore off stays a line of its own, and no other line is harmed by it."""

    def __init__(self, path: str | Path, *, fsync: bool = False) -> None:
        """`fsync`: a line is on the disk when `emit` returns, at a few milliseconds each."""
        self._fsync = fsync
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - open until close()
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def emit(self, decision: Decision) -> None:
        """One write for the whole line."""
        line = Line(
            time=time.time(),
            step=decision.step,
            state=decision.state,
            train=decision.train,
            reasons=decision.reasons,
            metrics=metrics_of(decision),
        )
        rest = memoryview(msgspec.json.encode(line) + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]
        if self._fsync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Twice does no harm."""
        self._file.close()
