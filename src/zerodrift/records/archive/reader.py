"""Reading an archive: beside its writer or long after, by as many as like. A damaged piece is refused by name, alone."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from zerodrift.core.errors import DigestMismatch, MissingExtra, RecordError, ZerodriftError
from zerodrift.records.archive.index import EVERYTHING, Entry, Index, Location, Query, Removed
from zerodrift.records.archive.journal import Broken, decode, encode, read_frame, scan
from zerodrift.records.archive.layout import (
    DAMAGED,
    INDEX,
    JOURNAL,
    JOURNALS,
    SEGMENT,
    SEGMENTS,
    is_archive,
    journal_path,
    pieces_on_disk,
    segment_path,
)
from zerodrift.records.archive.segment import open_segment, read_described, sha256_of
from zerodrift.records.archived import ArchivedBatch


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something in an archive that is not as it was written."""

    where: str
    code: str
    message: str
    batches: int
    """That cannot be read because of it."""


def _no_archive(directory: Path) -> str:
    if not directory.exists():
        return f"{directory} is not there"
    inside = directory / "archive"
    hint = f"; did you mean {inside}?" if is_archive(inside) else ""
    return f"{directory} is no archive; it holds neither an index nor journals{hint}"


class ArchiveReader:
    """The batches of an archive directory."""

    def __init__(self, directory: str | Path) -> None:
        """Nothing is read but the index."""
        directory = Path(directory)
        if not is_archive(directory):
            raise RecordError(_no_archive(directory))
        self._directory = directory
        self._index = Index.to_read(directory)
        self._opened: tuple[str, Any] | None = None
        """The last segment, whose digest was right."""
        weakref.finalize(self, self._index.close)

    def close(self) -> None:
        """Let go of the index; a reader that is dropped does so too."""
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def entries(self, query: Query = EVERYTHING) -> list[Entry]:
        """What the index says of the batches that are asked for."""
        return self._index.entries(query)

    def find(self, name: str) -> Entry:
        """The batch whose name begins with `name`."""
        found = self._index.named(name) if name else []
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(entry.batch[:16] for entry in found[:4])
            raise RecordError(f"{len(found)} batches begin with {name!r} ({shown}); write more of the name")
        gone = [each for each in self._index.removed() if name and each.batch.startswith(name)]
        why = f"; it was removed: {gone[-1].why}" if gone else "; `zerodrift archive ls` lists them"
        raise RecordError(f"no batch begins with {name!r}{why}")

    def removed(self, query: Query = EVERYTHING) -> list[Removed]:
        """What is no longer there, of the batches that are asked for."""
        return self._index.removed(query)

    def events(self) -> list[tuple[float, str]]:
        """What happened to the archive: kills that were recovered from, and what was cut off then."""
        return self._index.events()

    def place(self, entry: Entry) -> str:
        """The file that holds a batch now."""
        location = self._index.locate(entry.batch)
        return "removed" if location is None else self._path(location).relative_to(self._directory).as_posix()

    def read(self, entry: Entry) -> ArchivedBatch:
        """The batch itself."""
        location = self._located(entry)
        try:
            return self._read(entry, location)
        except FileNotFoundError:
            # Sealed or removed since we asked; if neither, the file is gone.
            if (now := self._located(entry)) == location:
                raise RecordError(
                    f"{self._shown(location)} is missing; the other batches can be read"
                ) from None
        return self._read(entry, now)

    def findings(self) -> Iterator[Finding]:
        """Read everything, and say what cannot be."""
        if (damage := self._index.damage()) is not None:
            yield Finding(where=INDEX, code=RecordError.code, message=damage, batches=0)
        failed: dict[tuple[str, str, str], int] = {}
        for entry in self.entries():
            try:
                if encode(self.read(entry)).digest != entry.batch:
                    raise DigestMismatch(
                        f"{self.place(entry)}: the batch {entry.batch[:12]} is not what was written"
                    )
            except MissingExtra:
                raise
            except ZerodriftError as error:
                key = (self.place(entry), error.code, str(error))
                failed[key] = failed.get(key, 0) + 1
        for (where, code, message), batches in failed.items():
            yield Finding(where=where, code=code, message=message, batches=batches)

    def unfinished(self) -> Iterator[str]:
        """What the next writer will put in order, and what an earlier one set aside. None of it was acknowledged and is lost."""
        segments = {segment.piece for segment in self._index.segments()}
        for piece in pieces_on_disk(self._directory, JOURNALS, JOURNAL):
            try:
                content = journal_path(self._directory, piece).read_bytes()
            except FileNotFoundError:
                continue  # sealed since
            for found in scan(content):
                if isinstance(found, Broken) and found.last:
                    size = found.end - found.begin
                    yield f"{JOURNALS}/{piece}{JOURNAL}: {size} bytes at its end are of a batch that was never acknowledged"
        for piece in pieces_on_disk(self._directory, SEGMENTS, SEGMENT):
            if piece not in segments:
                yield f"{SEGMENTS}/{piece}{SEGMENT}: it is in no index yet"
        for path in sorted((self._directory / JOURNALS).glob(f"*{DAMAGED}")):
            yield f"{JOURNALS}/{path.name}: set aside, because it was damaged"

    def _located(self, entry: Entry) -> Location:
        location = self._index.locate(entry.batch)
        if location is None:
            raise RecordError(f"the batch {entry.batch[:12]} was removed while it was about to be read")
        return location

    def _read(self, entry: Entry, location: Location) -> ArchivedBatch:
        path = self._path(location)
        if location.sha256 is not None:
            digest, _, batch = read_described(
                self._segment(location.piece, location.sha256), path, location.place
            )
            self._check_same(
                entry, digest, f"{self._shown(location)}: the batch in row group {location.place}"
            )
            return batch
        frame = read_frame(path, location.place)
        where = f"{self._shown(location)}: the batch at byte {location.place}"
        self._check_same(entry, frame.digest, where)
        return decode(frame.payload, where)

    @staticmethod
    def _check_same(entry: Entry, digest: str, where: str) -> None:
        if digest != entry.batch:
            raise DigestMismatch(f"{where} is another than the index says; the others can be read")

    def _segment(self, piece: str, sha256: str) -> Any:
        """The file, once it is seen to be the one that was sealed."""
        if self._opened is None or self._opened[0] != piece:
            path = segment_path(self._directory, piece)
            if (found := sha256_of(path)) != sha256:
                raise DigestMismatch(
                    f"{SEGMENTS}/{path.name} has the digest {found[:12]}, and was sealed with {sha256[:12]}: it is torn or "
                    "was altered; the other segments can be read"
                )
            self._opened = (piece, open_segment(path))
        return self._opened[1]

    def _path(self, location: Location) -> Path:
        where = journal_path if location.sha256 is None else segment_path
        return where(self._directory, location.piece)

    def _shown(self, location: Location) -> str:
        return self._path(location).relative_to(self._directory).as_posix()
