"""New lines of a file that somebody else appends to: each is read once, however many look.

The file may not be there yet, may end in half a line, and may be moved away or cut while it is read.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

CHUNK = 2**20
"""Bytes of one reading: 700 lines, so that a long file is shown while it is still being read."""
LONGEST = 4 * 2**20
"""Bytes of a line; the monitor writes 2,000. Beyond it, the line is skipped and counted."""


class Tail:
    """One file, by its name."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened yet."""
        self.path = path
        self.skipped = 0
        """Lines that were too long, or cut off by a rotation."""
        self._file: BinaryIO | None = None
        self._held = b""
        self._dropping = False

    @property
    def found(self) -> bool:
        """Whether there was a file."""
        return self._file is not None

    def read(self) -> list[bytes]:
        """Whole lines since the last call, at most `CHUNK` bytes of them; empty where there is nothing new now."""
        if self._file is None and not self._open():
            return []
        data = self._next()
        if not data and self._moved() and self._open():
            data = self._next()
        return self._lines(data)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                return False  # opening a pipe would wait for its writer
            file = self.path.open("rb", buffering=0)
        except OSError:
            return False
        self.close()
        self._file = file
        self._forget_half()
        return True

    def _next(self) -> bytes:
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            # Cut, as by copytruncate, or begun anew: what is there now comes after what was.
            self._file.seek(0)
            self._forget_half()
        return self._file.read(CHUNK) or b""

    def _moved(self) -> bool:
        """Whether the name belongs to another file now; the old one was read to its end."""
        assert self._file is not None
        try:
            there = self.path.stat()
        except OSError:
            return False  # moved away, and the next one is not there yet
        mine = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def _forget_half(self) -> None:
        self.skipped += bool(self._held)
        self._held, self._dropping = b"", False

    def _lines(self, data: bytes) -> list[bytes]:
        *lines, self._held = (self._held + data).split(b"\n")
        if self._dropping and lines:
            lines, self._dropping = lines[1:], False
        if len(self._held) > LONGEST:
            self.skipped += not self._dropping
            self._held, self._dropping = b"", True
        return [line for line in lines if line]
