"""A journal becomes a segment: written beside it, flushed, named, indexed, and only then is the journal let go."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from zerodrift.core.errors import DigestMismatch
from zerodrift.records.archive.index import Entry, Index, Sealed
from zerodrift.records.archive.journal import Broken, Frame, decode, encode, scan, write_all
from zerodrift.records.archive.layout import (
    DAMAGED,
    JOURNALS,
    SEGMENTS,
    UNFINISHED,
    flush_directory,
    journal_path,
    segment_path,
)
from zerodrift.records.archive.room import room_for
from zerodrift.records.archive.segment import open_segment, read_batch, segment_of


def seal(directory: Path, index: Index, piece: str) -> None:
    """Make a segment of a journal. Killed at any point, one of the two counts; one that was damaged meanwhile is set aside."""
    journal = journal_path(directory, piece)
    found = list(scan(journal.read_bytes()))
    frames = [each for each in found if isinstance(each, Frame)]
    lost = damaged(index, piece, found)
    if lost is not None:
        told = set_aside(directory, index, piece, frames, lost)
        with index.transaction():
            index.note(told)
        return
    if frames:
        seal_frames(directory, index, piece, frames)
    journal.unlink()
    flush_directory(directory / JOURNALS)


def damaged(index: Index, piece: str, found: Sequence[Frame | Broken]) -> list[Entry] | None:
    """Batches that were acknowledged and that their journal has no more; None where it is as it was written."""
    digests = {each.digest for each in found if isinstance(each, Frame)}
    lost = [entry for entry in index.of_piece(piece) if entry.batch not in digests]
    return lost if lost or any(isinstance(each, Broken) and not each.last for each in found) else None


def set_aside(
    directory: Path, index: Index, piece: str, whole: Sequence[Frame], lost: Sequence[Entry]
) -> str:
    """A journal that was damaged after it was written: what is whole is sealed, and the file is kept for whoever looks."""
    path = journal_path(directory, piece)
    with index.transaction():
        index.remove(lost, f"damaged in {path.name}")
    if whole:
        seal_frames(directory, index, piece, whole)
    path.replace(path.with_suffix(DAMAGED))
    flush_directory(directory / JOURNALS)
    return f"{piece}: the journal was damaged; {len(lost)} of its batches are lost, and it is kept as {piece}{DAMAGED}"


def seal_frames(directory: Path, index: Index, piece: str, frames: Sequence[Frame]) -> None:
    """The segment and its row in the index."""
    batches = (
        (frame.digest, frame.archived_at, decode(frame.payload, f"a batch of {piece}")) for frame in frames
    )
    content = segment_of(batches)
    path = segment_path(directory, piece)
    _write(path, content)
    _check_read_back(path, frames)
    last = max(frame.archived_at for frame in frames)
    sealed = Sealed(piece, len(content), hashlib.sha256(content).hexdigest(), last)
    with index.transaction():
        index.seal(sealed, [frame.digest for frame in frames])


def _check_read_back(path: Path, frames: Sequence[Frame]) -> None:
    """A journal is let go of only for a segment that gives the same batches back; it takes as long as to write it."""
    file = open_segment(path)
    for place, frame in enumerate(frames):
        if encode(read_batch(file, path, place)).digest != frame.digest:
            path.unlink()
            raise DigestMismatch(
                f"segments/{path.name} does not give the batch {frame.digest[:12]} back as it was written; it stays in its "
                "journal: try another version of pyarrow, and please report it"
            )


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with room_for(unfinished):
            handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_all(handle, content)
            finally:
                os.close(handle)
            unfinished.replace(path)
            flush_directory(path.parents[1] / SEGMENTS)
    finally:
        unfinished.unlink(missing_ok=True)
