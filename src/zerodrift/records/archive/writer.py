"""The archive of a running training: `append` returns when a batch is safe, or raises and has kept nothing of it.

with Archive(Path("runs/archive")) as archive:
    archive.append(batch)
"""

import json
import os
import platform
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from zerodrift.core import require
from zerodrift.core.errors import ArchiveLocked, InvalidValue, RecordError
from zerodrift.records.archive import recovery, retention
from zerodrift.records.archive.index import Index
from zerodrift.records.archive.journal import Encoded, encode, frame_of, write_all
from zerodrift.records.archive.layout import (
    JOURNAL,
    JOURNALS,
    LOCK,
    SEGMENT,
    SEGMENTS,
    WRITER,
    ArchiveSettings,
    Kept,
    flush_directory,
    journal_path,
    kept_of,
    number_of,
    piece_name,
    pieces_on_disk,
)
from zerodrift.records.archive.room import room_for
from zerodrift.records.archive.sealing import seal
from zerodrift.records.archive.segment import ARCHIVE
from zerodrift.records.archived import ArchivedBatch, BatchState
from zerodrift.records.arrow import arrow
from zerodrift.records.codec import write_atomically

USUAL = ArchiveSettings()


class Archive:
    """The one writer of an archive directory; any thread may append."""

    def __init__(self, directory: str | Path, settings: ArchiveSettings = USUAL) -> None:
        """Take the directory, and put in order what a kill left; `recovered` tells what that was."""
        arrow(ARCHIVE)  # now, and not when the first segment is sealed, hours into a training
        # A trainer may change its own directory, and what is kept stays together.
        directory = Path(directory).absolute()
        self._directory, self._settings = directory, settings
        _make(directory)
        self._lock = _held(directory)
        self._process, self._mutex = os.getpid(), threading.Lock()
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            self._index = Index.to_write(directory)
            undo.callback(self._index.close)
            self.recovered = tuple(recovery.recover(directory, self._index))
            self._pieces = {kept_of(name): name for name in pieces_on_disk(directory, JOURNALS, JOURNAL)}
            retention.clear(directory, self._index, settings)
            undo.pop_all()

    def keeps(self, batch: ArchivedBatch) -> bool:
        """Whether it would be kept: everything but healthy batches, and of these one in so many, whoever asks and when."""
        return (
            batch.state is not BatchState.OK
            or int(batch.content_key, 16) % self._settings.healthy_one_in == 0
        )

    def append(self, batch: ArchivedBatch) -> None:
        """Keep it, so that it survives whatever happens next. The same batch again is there already, and stays single."""
        require.instance(InvalidValue, "batch", batch, ArchivedBatch)
        with self._mutex:
            self._check_mine()
            if not self.keeps(batch):
                return
            encoded = encode(batch)
            if self._index.holds(encoded.digest):
                return
            kept = Kept.of(batch.state)
            piece = self._pieces.get(kept)
            if piece is not None and self._size(piece) >= self._settings.segment_bytes:
                self._seal(kept)
            self._write(self._piece(kept), encoded, batch)

    def close(self) -> None:
        """Seal what is there, and let go. Without it nothing is lost: the next writer goes on where this one was."""
        with self._mutex:
            if not self._lock.is_locked:
                return
            self._check_mine()
            try:
                # One by one: to make room for one, the other may be sealed and removed.
                while self._pieces:
                    self._seal(next(iter(self._pieces)))
            finally:
                self._index.close()
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_mine(self) -> None:
        if self._process != os.getpid():
            raise RecordError(
                f"{self._directory} was opened by process {self._process}, and this is a fork of it; append there"
            )
        if not self._lock.is_locked:
            raise RecordError(f"{self._directory} was closed; open it again to append")

    def _piece(self, kept: Kept) -> str:
        """The journal that grows; a new one where there is none."""
        if kept not in self._pieces:
            number = 1 + max((number_of(name) for name in self._names()), default=0)
            piece = piece_name(kept, number)
            with room_for(journal_path(self._directory, piece)):
                journal_path(self._directory, piece).touch()
                flush_directory(self._directory / JOURNALS)
            self._pieces[kept] = piece
        return self._pieces[kept]

    def _names(self) -> list[str]:
        """Of all pieces that there are or were."""
        return [
            *(sealed.piece for sealed in self._index.segments()),
            *(removed.piece for removed in self._index.removed()),
            *pieces_on_disk(self._directory, JOURNALS, JOURNAL),
            *pieces_on_disk(self._directory, SEGMENTS, SEGMENT),
        ]

    def _size(self, piece: str) -> int:
        path = journal_path(self._directory, piece)
        with room_for(path):
            return path.stat().st_size

    def _write(self, piece: str, encoded: Encoded, batch: ArchivedBatch) -> None:
        path, now = journal_path(self._directory, piece), time.time()
        with room_for(path):
            handle = os.open(path, os.O_WRONLY | os.O_APPEND)
            begin = os.fstat(handle).st_size
        try:
            with room_for(path):
                write_all(handle, frame_of(encoded, now))
            with self._index.transaction():
                self._index.add(encoded.digest, batch, (piece, begin), now)
        except BaseException:
            # An interrupt may come after the commit; then the batch is kept, though nobody was told.
            if not self._index.holds(encoded.digest):
                os.ftruncate(handle, begin)
            raise
        finally:
            os.close(handle)

    def _seal(self, kept: Kept) -> None:
        with room_for(journal_path(self._directory, self._pieces[kept])):
            seal(self._directory, self._index, self._pieces[kept])
        del self._pieces[kept]
        self._clear()

    def _clear(self) -> None:
        """Make room; a healthy journal is sealed, so that it can go, before a suspect segment has to."""
        doomed = retention.doomed(self._index.segments(), self._settings, time.time())
        if Kept.HEALTHY in self._pieces and any(
            kept_of(each.segment.piece) is Kept.SUSPECT for each in doomed
        ):
            seal(self._directory, self._index, self._pieces.pop(Kept.HEALTHY))
        retention.clear(self._directory, self._index, self._settings)


def _make(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise RecordError(f"{directory} is a file; an archive is a directory")
    held = {path.name for path in directory.iterdir()} if directory.exists() else set()
    if held and JOURNALS not in held:
        raise RecordError(f"{directory} holds other things than an archive; choose another directory")
    try:
        for folder in (JOURNALS, SEGMENTS):
            (directory / folder).mkdir(parents=True, exist_ok=True)
        flush_directory(directory)
    except OSError as error:
        raise RecordError(
            f"{directory} cannot be made ({error.strerror or error}); choose another directory"
        ) from error


def _held(directory: Path) -> FileLock:
    """The lock, which the system lets go of if we are killed; a second writer is told who has it."""
    try:
        lock = FileLock(directory / LOCK, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout as error:
        raise ArchiveLocked(
            f"{directory} is written by {_who(directory)}; close it first, or choose another directory"
        ) from error
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    who = {"process": os.getpid(), "host": platform.node(), "since": since}
    try:
        write_atomically(directory / WRITER, json.dumps(who).encode())
    except OSError:
        lock.release()
        raise
    return lock


def _who(directory: Path) -> str:
    try:
        who = json.loads((directory / WRITER).read_bytes())
        return f"process {who['process']} on {who['host']} since {who['since']} UTC"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process, which has not yet said who it is"
