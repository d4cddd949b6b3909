"""JSON lines on disk: strict to read, whole lines only, every error with its line number.

A writer appends a line and flushes it to the disk before it says so; a reader refuses what it cannot decode and
reports a torn last line as such, because that is what a kill leaves behind.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from zerodrift.core.errors import RecordError

T = TypeVar("T")

MAX_LINE_BYTES = 64 * 2**20
"""A line above this is an attack or a mistake; a rollout of 100k tokens needs 5 MB."""


class LineWriter(Generic[T]):
    """Appends values to a file, one JSON line each."""

    def __init__(self, path: Path) -> None:
        """Opens for appending; what is there stays."""
        self._file = path.open("ab")
        self._encoder = msgspec.json.Encoder()

    def write(self, *values: T) -> None:
        """All of `values` are on the disk when this returns."""
        for value in values:
            self._file.write(self._encoder.encode(value) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Every line of `path` as a `kind`; the first bad line is refused by number."""
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise RecordError(f"{path.name}, line {number}: {len(line)} bytes; lines end at {MAX_LINE_BYTES}")
            if not line.endswith(b"\n"):
                raise RecordError(
                    f"{path.name}, line {number}: the line is torn, as after a kill; "
                    "delete it or resume the run that wrote it"
                )
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise RecordError(f"{path.name}, line {number}: {error}") from error


def drop_torn_line(path: Path) -> bool:
    """Cut an unfinished last line off, and say whether there was one."""
    data_end = path.stat().st_size
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole == data_end:
            return False
        file.truncate(whole)
    return True


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
