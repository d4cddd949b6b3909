"""Is an update of several engines made or not? Decided once, by whoever says so first. Torch-free.

A file for each update in a directory that all of them see, named by the identity of its manifest and linked into place in one
step: the first to decide has decided for all, and a kill leaves a decision or none. The trainer decides that an update is made
when every engine has it on its disk; an engine that lost the trainer in between decides that it is not, unless it is.
"""

import os
import re
import secrets
from pathlib import Path

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue, RecordError
from zerodrift.records.archive.layout import flush_directory
from zerodrift.records.archive.room import room_for

_IDENTITY = re.compile(r"[0-9a-f]{64}")
_WORDS = {b"made\n": True, b"not made\n": False}


class Decisions:
    """Of one trainer and its engines."""

    def __init__(self, directory: Path) -> None:
        """Made where it is not there yet."""
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def decide(self, identity: str, *, made: bool) -> bool:
        """What holds for the update of this identity from now on: `made`, or what was decided before."""
        target = self._path(identity)
        require.instance(InvalidValue, "made", made, bool)
        mine = self._directory / f".{identity}-{secrets.token_hex(8)}"
        word = next(word for word, value in _WORDS.items() if value is made)
        with room_for(target):
            try:
                handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                try:
                    os.write(handle, word)
                    os.fsync(handle)
                finally:
                    os.close(handle)
                # A link is made or not, and never in place of another file.
                os.link(mine, target)
                flush_directory(self._directory)
            except FileExistsError:
                pass
            finally:
                mine.unlink(missing_ok=True)
        found = self.found(identity)
        assert found is not None, "it was just decided"
        return found

    def found(self, identity: str) -> bool | None:
        """What was decided; None where nothing was yet."""
        path = self._path(identity)
        try:
            word = path.read_bytes()
        except FileNotFoundError:
            return None
        if word not in _WORDS:
            raise RecordError(
                f"{path} says {word[:40]!r}, which is no decision; remove it when no update is under way"
            )
        return _WORDS[word]

    def made(self, identity: str) -> bool:
        """Whether it is certain that the update is made: for `Updates(decided=…)`."""
        return self.found(identity) is True

    def _path(self, identity: str) -> Path:
        if not _IDENTITY.fullmatch(identity):
            raise InvalidValue(f"an update is called {identity[:80]!r}; its identity is 64 hex digits")
        return self._directory / identity
