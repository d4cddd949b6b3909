"""One directory for all that a monitor leaves behind: what `zerodrift view DIR` shows, and a restart goes on from.

steps.jsonl     a line for each decision
monitor.json    the state
archive/        batches that were kept, where `observe` is given their ids
.lock           held while a monitor writes
ended           there once it is closed, or its training is over
"""

import logging
from pathlib import Path

from filelock import FileLock, Timeout

from zerodrift.core.errors import ArchiveLocked, RecordError
from zerodrift.monitor.archive import Archive, opened
from zerodrift.monitor.decision import Decision
from zerodrift.monitor.steps import StepLog
from zerodrift.monitor.writer import ENDED, LOCK
from zerodrift.records.archive.writer import Archive as Directory
from zerodrift.records.lock import ASKED_S

STEPS, STATE, ARCHIVE = "steps.jsonl", "monitor.json", "archive"
RANKS = "rank*"
"""Directories of the other ranks, in that of the first."""

logger = logging.getLogger("zerodrift.monitor")


class MonitorDirectory:
    """The one writer of it."""

    def __init__(self, path: Path) -> None:
        """Made where it is not there; refused where another monitor writes."""
        path = path.absolute()
        if path.exists() and not path.is_dir():
            raise RecordError(f"{path} is a file; a monitor writes into a directory")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(
                f"{path} cannot be made ({error.strerror or error}); choose another directory"
            ) from error
        self.path, self.state = path, path / STATE
        self._lock = FileLock(path / LOCK, timeout=ASKED_S, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ArchiveLocked(
                f"another monitor writes {path}; close() that one, or give each rank a directory of its own "
                f"({path / 'rank1'} and so on)"
            ) from error
        except OSError as error:
            raise RecordError(
                f"{path} cannot be written ({error.strerror or error}); choose another directory"
            ) from error
        (path / ENDED).unlink(missing_ok=True)
        self._ended = self._closed = False
        self._steps = StepLog(path / STEPS)
        self._archive: Archive | None = None
        self.failures = 0
        """Lines that could not be written."""

    def archive(self) -> Archive | None:
        """Opened with the first batch that has ids: a monitor without needs no pyarrow."""
        if self._archive is None:
            self._archive = opened(self.path / ARCHIVE)
        return self._archive

    def tell(self, decision: Decision) -> None:
        """A line more, and no end yet. A full disk stops no training: the decision stands without its record, and is counted."""
        try:
            if self._ended and not self._closed:
                (self.path / ENDED).unlink(missing_ok=True)
                self._ended = False
            self._steps.append(decision)
        except OSError as error:
            self.failures += 1
            logger.warning("%s: %s (%d lines are missing)", self.path / STEPS, error.strerror, self.failures)

    def forget_after(self, step: int) -> None:
        """Lines of later steps go."""
        try:
            self._steps.drop_after(step)
        except OSError as error:
            raise RecordError(
                f"{self.path / STEPS} cannot be written ({error.strerror or error}); look at the disk"
            ) from error

    def end(self) -> None:
        """Nothing more is expected: what looks on need not take silence for a long step."""
        try:
            (self.path / ENDED).touch()
            self._ended = True
        except OSError as error:
            logger.warning("%s: %s", self.path / ENDED, error.strerror)

    def close(self) -> None:
        """Twice does no harm: by then the directory may be another monitor's."""
        if self._closed:
            return
        self._closed = True
        self.end()
        try:
            if isinstance(self._archive, Directory):
                self._archive.close()
        finally:
            self._lock.release()
