"""A journal becomes a segment: written beside it, flushed, named, indexed, and only then is the journal let go."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from zerodrift.core.errors import DigestMismatch
from zerodrift.records.archive.index import Index, Sealed
from zerodrift.records.archive.journal import Frame, decode, encode, scan, write_all
from zerodrift.records.archive.layout import (
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
    """Make a segment of a journal without a broken frame. Killed at any point, one of the two counts."""
    journal = journal_path(directory, piece)
    frames = [found for found in scan(journal.read_bytes()) if isinstance(found, Frame)]
    if frames:
        seal_frames(directory, index, piece, frames)
    journal.unlink()
    flush_directory(directory / JOURNALS)


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
