"""What a kill left behind, put in order before the next batch: nothing acknowledged is lost, and nothing is there twice.

Whatever had to be dropped or mended is said, to the caller and in the index.
"""

import os
from pathlib import Path

from zerodrift.core.errors import DigestMismatch, RecordError
from zerodrift.records.archive.index import Index, Sealed
from zerodrift.records.archive.journal import Broken, Frame, decode, encode, scan
from zerodrift.records.archive.layout import (
    JOURNAL,
    JOURNALS,
    SEGMENT,
    SEGMENTS,
    UNFINISHED,
    journal_path,
    pieces_on_disk,
    segment_path,
)
from zerodrift.records.archive.sealing import damaged, set_aside
from zerodrift.records.archive.segment import open_segment, read_described, sha256_of


def recover(directory: Path, index: Index) -> list[str]:
    """Put the directory in order, and tell what was done."""
    for unfinished in (directory / SEGMENTS).glob(f"*{UNFINISHED}"):
        unfinished.unlink()
    sealed = {segment.piece for segment in index.segments()}
    told = []
    for piece in pieces_on_disk(directory, JOURNALS, JOURNAL):
        if piece in sealed:
            # Killed after the segment counted and before its journal was let go.
            journal_path(directory, piece).unlink()
            continue
        segment_path(directory, piece).unlink(missing_ok=True)
        told += _mend(directory, index, piece)
    told += _adopt(directory, index)
    with index.transaction():
        for what in told:
            index.note(what)
    return told


def _mend(directory: Path, index: Index, piece: str) -> list[str]:
    """A journal with its end as it was acknowledged, and every whole batch of it in the index."""
    path = journal_path(directory, piece)
    found = list(scan(path.read_bytes()))
    whole = [each for each in found if isinstance(each, Frame)]
    broken = [each for each in found if isinstance(each, Broken)]
    told = _index_whole(index, piece, whole)
    lost = damaged(index, piece, found)
    if lost is not None:
        return [*told, set_aside(directory, index, piece, whole, lost)]
    if broken:
        os.truncate(path, broken[0].begin)
        cut = broken[0].end - broken[0].begin
        told.append(f"{piece}: cut off {cut} bytes of a batch that was never acknowledged")
    return told


def _index_whole(index: Index, piece: str, frames: list[Frame]) -> list[str]:
    """Batches that were on the disk when the kill came, and not yet in the index."""
    told = []
    for frame in frames:
        if not index.holds(frame.digest):
            batch = decode(frame.payload, f"journals/{piece}{JOURNAL}: the batch at byte {frame.begin}")
            with index.transaction():
                index.add(frame.digest, batch, (piece, frame.begin), frame.archived_at)
            told.append(f"{piece}: finished the batch {frame.digest[:12]} of step {batch.step}")
    return told


def _adopt(directory: Path, index: Index) -> list[str]:
    """Segments that the index does not know: removed ones that are still there, or all of them where it was lost."""
    known = {segment.piece for segment in index.segments()}
    removed = {each.piece for each in index.removed()}
    told = []
    for piece in pieces_on_disk(directory, SEGMENTS, SEGMENT):
        path = segment_path(directory, piece)
        if piece in known:
            continue
        if piece in removed:
            path.unlink()
            continue
        try:
            told.append(_read_in(index, path, piece))
        except RecordError as error:
            told.append(
                f"{piece}: its segment is in no index and cannot be read ({error}); it is left as it is"
            )
    return told


def _read_in(index: Index, path: Path, piece: str) -> str:
    file = open_segment(path)
    batches = [read_described(file, path, place) for place in range(file.num_row_groups)]
    for digest, _, batch in batches:
        if encode(batch).digest != digest:
            raise DigestMismatch(f"the batch {digest[:12]} is not what was written")
    last = max(archived_at for _, archived_at, _ in batches)
    with index.transaction():
        for place, (digest, archived_at, batch) in enumerate(batches):
            if not index.holds(digest):
                index.add(digest, batch, (piece, place), archived_at)
        sealed = Sealed(piece, path.stat().st_size, sha256_of(path), last)
        index.seal(sealed, [digest for digest, _, _ in batches])
    return f"{piece}: its segment was in no index, and is again"
