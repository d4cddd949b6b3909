"""JSON lines on disk: strict to read, whole lines only, every error with its line number.

A writer appends a line and flushes it to the disk before it says so; a reader refuses what it cannot decode and
reports a torn last line as such, because that is what a kill leaves behind.
"""

import gzip
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, Self, TypeVar

import msgspec

from zerodrift.core.errors import NonFinite, RecordError

T = TypeVar("T")

MAX_LINE_BYTES = 64 * 2**20
"""A line above this is an attack or a mistake; a rollout of 100k tokens needs 5 MB."""
GZIP = b"\x1f\x8b"
"""What every gzip stream begins with, whatever the file is called."""

BLOCK_BYTES = 2**20


class LineWriter(Generic[T]):
    """Appends values to a file, one JSON line each."""

    def __init__(self, path: Path) -> None:
        """Opens for appending; what is there stays."""
        self._path = path
        self._file = path.open("ab")
        self._encoder = msgspec.json.Encoder()

    def write(self, *values: T) -> None:
        """All of `values` are on the disk when this returns; none of them if one cannot be written."""
        lines = [self._line(value) for value in values]
        if (longest := max(map(len, lines), default=0)) > MAX_LINE_BYTES:
            raise RecordError(
                f"{self._path.name}: a line of {longest} bytes was about to be written, and at most {MAX_LINE_BYTES} "
                "can be read back; ask for fewer alternatives or shorter outputs"
            )
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _line(self, value: T) -> bytes:
        """JSON has no NaN and no infinity: they would become null, which is no number to whoever reads the line."""
        line = self._encoder.encode(value) + b"\n"
        if b"null" in line and (wrong := _non_finite(msgspec.to_builtins(value))):
            raise NonFinite(
                f"{self._path.name}: {wrong} was about to be written, and could not be read back; nothing was written"
            )
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _non_finite(value: Any, where: str = "") -> str:
    """Where the first number is that is none, and which; empty where all are."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{where.lstrip('.')}={value}"
    if isinstance(value, dict):
        inside = ((f"{where}.{name}", each) for name, each in value.items())
    elif isinstance(value, list | tuple):
        inside = ((f"{where}[{place}]", each) for place, each in enumerate(value))
    else:
        return ""
    return next((found for name, each in inside if (found := _non_finite(each, name))), "")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line of `path`, unpacked if it is gzip, counted from 1; the last one may be torn.

    It is read once and from the front, so that `path` may be a pipe.
    """
    with path.open("rb") as stored:
        packed = stored.peek(len(GZIP)).startswith(GZIP)
        file = gzip.GzipFile(fileobj=stored) if packed else stored
        number = 0
        while line := _next_line(file, f"{path.name}, line {number + 1}"):
            number += 1
            yield number, line


def _next_line(file: BinaryIO | gzip.GzipFile, where: str) -> bytes:
    try:
        # With a limit: a file without a newline would be one line, and might not fit into memory.
        line = file.readline(MAX_LINE_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordError(
            f"{where}: its gzip stream is torn or damaged ({error}); what can still be read, zcat FILE gives"
        ) from error
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(
            f"{where}: more than {MAX_LINE_BYTES} bytes, which no rollout needs; name a file of JSON lines"
        )
    return line


def read_lines(path: Path, kind: type[T], skip: int = 0) -> Iterator[T]:
    """Every line of `path` after the first `skip` as a `kind`; the first bad line is refused by number."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in numbered_lines(path):
        if not line.endswith(b"\n"):
            raise RecordError(
                f"{path.name}, line {number}: the line is torn, as after a kill; "
                "delete it or resume the run that wrote it"
            )
        if number <= skip:
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, RecordError, RecursionError, UnicodeDecodeError) as error:
            raise RecordError(f"{path.name}, line {number}: {error}") from error


def drop_torn_line(path: Path) -> bool:
    """Cut an unfinished last line off, and say whether there was one."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, end)
        file.truncate(whole)
    return whole != end


def _end_of_last_line(file: BinaryIO, end: int) -> int:
    """Read from the back: a run's file may not fit into memory, and its last line always does."""
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Readers see the old file or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
