"""One JSON object per step, appended to a file."""

import os
from pathlib import Path

from zerodrift.monitor.decision import Decision
from zerodrift.monitor.steps import Line, line_of

__all__ = ["Jsonl", "Line"]


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
        rest = memoryview(line_of(decision))
        while rest:
            rest = rest[self._file.write(rest) :]
        if self._fsync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Twice does no harm."""
        self._file.close()
