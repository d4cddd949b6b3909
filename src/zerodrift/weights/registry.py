"""Which versions there are and which one is current: an append-only log that a kill cannot tear. Torch-free.

`versions.jsonl` has a line for every commit, publication, abort and removal. A line is on the disk before what it says is
done, and carries a seal over itself and all lines before it: one that was changed, taken out or put in is seen. Lines cut
off at the end are not; a seal that travels with rollouts would show that. A line without its end was never acknowledged,
and is dropped.
"""

import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from zerodrift.core.errors import (
    ArchiveLocked,
    DigestMismatch,
    NotRetained,
    RecordError,
    UnsafePath,
    VersionConflict,
)
from zerodrift.core.frozen import freeze
from zerodrift.core.version import WeightVersion
from zerodrift.records.archive.journal import write_all
from zerodrift.records.archive.layout import flush_directory
from zerodrift.records.archive.room import room_for
from zerodrift.records.codec import drop_torn_line, numbered_lines
from zerodrift.weights.folder import refused

LOG, LOCK = "versions.jsonl", ".lock"
_START = "0" * 64


class Kind(StrEnum):
    """What a line tells."""

    COMMITTED = "committed"
    """It is verified, and kept on the disk."""
    PUBLISHED = "published"
    """It is the one that serves, from here on and after every restart."""
    ABORTED = "aborted"
    """It was committed, and will not be published."""
    FORGOTTEN = "forgotten"
    """It made room, and can no longer be rolled back to."""


class RegistryEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line."""

    serial: int
    """From 1, without a gap: versions are ordered by it and never by a clock."""
    kind: Kind
    version: WeightVersion
    manifest: str
    """Identity of the manifest that it came with."""
    follows: str | None = None
    """Label of the version that it was published in place of; None for the first."""
    kv: str | None = None
    """What became of KV then."""
    at: float
    """Seconds since the epoch, for people."""
    seal: str


class Known(msgspec.Struct, frozen=True):
    """A version that was committed once."""

    version: WeightVersion
    manifest: str
    kept: bool
    """Whether its weights are on the disk."""
    was_current: bool = False

    @property
    def taken(self) -> bool:
        """Whether its label is: one that never served, and is gone, may come again."""
        return self.kept or self.was_current


class Versions(msgspec.Struct, frozen=True):
    """All that a log tells, as a value."""

    known: Mapping[str, Known] = {}
    """By label, in the order of commits."""
    current: str | None = None
    trail: tuple[str, ...] = ()
    """Labels in the order in which they were published."""

    def __post_init__(self) -> None:
        """What was told stays told."""
        freeze(self, "known")

    def after(self, entry: RegistryEntry) -> "Versions":
        """With one more line; one that contradicts those before it is refused."""
        label = entry.version.label
        found = self.known.get(label)
        if entry.kind is Kind.COMMITTED:
            if found is not None and found.taken:
                raise VersionConflict(
                    f"a version {label!r} was committed before; give every update its own label"
                )
            return self._with(label, Known(entry.version, entry.manifest, kept=True))
        if found is None or not found.kept or found.version != entry.version:
            raise NotRetained(f"version {label!r} is not kept; there are {', '.join(map(repr, self.kept))}")
        if entry.kind is Kind.PUBLISHED:
            if entry.follows != self.current:
                raise VersionConflict(
                    f"{entry.follows!r} was expected to be current, and {self.current!r} is"
                )
            later = self._with(label, msgspec.structs.replace(found, was_current=True))
            return msgspec.structs.replace(later, current=label, trail=(*self.trail, label))
        if label == self.current or (entry.kind is Kind.ABORTED and found.was_current):
            raise VersionConflict(f"version {label!r} serves or has served; it cannot be {entry.kind}")
        return self._with(label, msgspec.structs.replace(found, kept=False))

    def _with(self, label: str, known: Known) -> "Versions":
        return msgspec.structs.replace(self, known={**self.known, label: known})

    @property
    def kept(self) -> list[str]:
        """Labels of versions whose weights are on the disk, in the order of commits."""
        return [label for label, known in self.known.items() if known.kept]

    @property
    def previous(self) -> str | None:
        """The version that served before the current one, where it is still kept."""
        others = [label for label in self.trail if label != self.current and self.known[label].kept]
        return others[-1] if others else None

    def require_kept(self, label: str | None) -> Known:
        """A version that is kept; None: there is none before the current one."""
        found = None if label is None else self.known.get(label)
        if found is None or not found.kept:
            named = "before the current one" if label is None else repr(label)
            raise NotRetained(f"version {named} is not kept; there are {', '.join(map(repr, self.kept))}")
        return found

    def require_new(self, label: str, parent: WeightVersion | None) -> None:
        """Nothing was committed as `label`, and `parent` was."""
        if label in self.known and self.known[label].taken:
            raise VersionConflict(
                f"a version {label!r} was committed before; a replay is refused, and every update has its own label"
            )
        if parent is not None and (
            parent.label not in self.known
            or parent.digest not in (None, self.known[parent.label].version.digest)
        ):
            raise VersionConflict(f"{label!r} follows {parent.label!r}, which was never committed here")

    def to_go_back_to(self, label: str | None) -> Known:
        """`label`, or the version before the current one; it is kept, and it served."""
        found = self.require_kept(self.previous if label is None else label)
        if not found.was_current:
            raise NotRetained(f"version {label!r} never served, so nobody can go back to it; publish it")
        return found


class Registry:
    """The log, held by one process at a time."""

    def __init__(self, directory: Path) -> None:
        """Take the directory, made where it is not there yet, and read what it tells."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._path = directory, directory / LOG
        self._lock, self._mutex, self._closed = _held(directory), threading.Lock(), False
        try:
            self.begun, self._handle = self._opened()
            try:
                drop_torn_line(self._path)
                self._entries = list(read_log(self._path))
                self.versions = _folded(self._entries, self._path)
            except BaseException:
                os.close(self._handle)
                raise
        except BaseException:
            self._lock.release()
            raise

    @property
    def entries(self) -> tuple[RegistryEntry, ...]:
        """Every line."""
        return tuple(self._entries)

    def append(
        self,
        kind: Kind,
        version: WeightVersion,
        manifest: str,
        *,
        follows: str | None = None,
        kv: str | None = None,
    ) -> RegistryEntry:
        """Say it, so that it holds whatever happens next; or refuse it, and nothing was said. Any thread may."""
        with self._mutex:
            return self._append(kind, version, manifest, follows, kv)

    def _append(
        self, kind: Kind, version: WeightVersion, manifest: str, follows: str | None, kv: str | None
    ) -> RegistryEntry:
        if self._closed:
            # The number of its handle may be that of another file by now.
            raise RecordError(f"{self._path} was closed, and {version.label!r} cannot be {kind} any more")
        before = self._entries[-1].seal if self._entries else _START
        entry = RegistryEntry(
            serial=len(self._entries) + 1,
            kind=kind,
            version=version,
            manifest=manifest,
            follows=follows,
            kv=kv,
            at=time.time(),
            seal="",
        )
        entry = msgspec.structs.replace(entry, seal=_seal(before, entry))
        versions = self.versions.after(entry)
        size = os.fstat(self._handle).st_size
        with room_for(self._path):
            try:
                write_all(self._handle, msgspec.json.encode(entry) + b"\n")
            except BaseException:
                # Half a line in the middle would make the next one unreadable.
                os.ftruncate(self._handle, size)
                raise
        self._entries.append(entry)
        self.versions = versions
        return entry

    def close(self) -> None:
        """Let go of the directory."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                os.close(self._handle)
                self._lock.release()

    def _opened(self) -> tuple[bool, int]:
        """Whether there was a log, and the log: a plain file of this directory, before anything is changed in it."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        begun = os.path.lexists(self._path)
        with refused(str(self._path), "the log of versions"):
            handle = os.open(self._path, flags | (0 if begun else os.O_CREAT | os.O_EXCL), 0o644)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise UnsafePath(f"{self._path} is no plain file; it should be the log of versions")
        if not _taken(handle):
            os.close(handle)
            raise _in_use(self._directory)
        if not begun:
            flush_directory(self._directory)
        return begun, handle


def read_log(path: Path) -> Iterator[RegistryEntry]:
    """Every line of a log, each sealed as it was written."""
    seal = _START
    for number, line in numbered_lines(path):
        where = f"{path.name}, line {number}"
        try:
            entry = msgspec.json.decode(line, type=RegistryEntry)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise RecordError(f"{where} cannot be read: {error}") from error
        if entry.serial != number or entry.seal != _seal(seal, entry):
            raise DigestMismatch(
                f"{where} is not as it was written, or lines before it are not; put the file back as it was"
            )
        seal = entry.seal
        yield entry


def _folded(entries: list[RegistryEntry], path: Path) -> Versions:
    versions = Versions()
    for entry in entries:
        try:
            versions = versions.after(entry)
        except (VersionConflict, NotRetained) as error:
            raise RecordError(
                f"{path.name}, line {entry.serial} contradicts those before it: {error}"
            ) from error
    return versions


def _seal(before: str, entry: RegistryEntry) -> str:
    content = msgspec.json.encode(msgspec.structs.replace(entry, seal=before))
    return hashlib.sha256(content).hexdigest()


def _held(directory: Path) -> FileLock:
    # Of the process: a lock that only the thread knows which took it could not be let go of by another.
    lock = FileLock(directory / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise _in_use(directory) from error
    return lock


def _taken(handle: int) -> bool:
    """The log itself: whoever tidies away `.lock` lets nobody else in."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(directory: Path) -> ArchiveLocked:
    return ArchiveLocked(
        f"another engine updates its weights in {directory}; give each engine a directory of its own"
    )
