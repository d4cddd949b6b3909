"""What goes when there is too much, or when it is too old: whole segments, healthy ones first, each with a line in the index."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zerodrift.records.archive.index import Index, Sealed
from zerodrift.records.archive.layout import ArchiveSettings, Kept, kept_of, segment_path


class Doomed(NamedTuple):
    """A segment that has to go, and why."""

    segment: Sealed
    why: str


def doomed(segments: Sequence[Sealed], settings: ArchiveSettings, now: float) -> list[Doomed]:
    """In the order they go: of each kind the oldest first, and no suspect one for its size while there is a healthy one."""
    order = sorted(segments, key=lambda each: (kept_of(each.piece) is Kept.SUSPECT, each.last_at, each.piece))
    found, left = [], sum(each.size for each in order)
    # Both journals may grow to a segment's size before anybody looks again.
    most = None if settings.max_bytes is None else settings.max_bytes - 2 * settings.segment_bytes
    for each in order:
        if settings.max_age_s is not None and now - each.last_at > settings.max_age_s:
            found.append(Doomed(each, f"older than {settings.max_age_s:g} s"))
        elif most is not None and left > most:
            found.append(Doomed(each, f"more than {settings.max_bytes} bytes in all"))
        else:
            continue
        left -= each.size
    return found


def clear(directory: Path, index: Index, settings: ArchiveSettings) -> None:
    """Remove what has to go: first from the index, with a line that says so, then from the disk."""
    for segment, why in doomed(index.segments(), settings, time.time()):
        with index.transaction():
            index.remove(index.of_piece(segment.piece), why)
            index.forget_segment(segment.piece)
        segment_path(directory, segment.piece).unlink(missing_ok=True)
