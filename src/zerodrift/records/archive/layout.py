"""What an archive directory holds, and when a batch in it is safe.

    index.sqlite                       every batch: where it is, and what was decided about it; what was removed, and why
    journals/suspect-000002.journal    batches as they come: each is flushed to the disk before it is acknowledged
    segments/healthy-000001.parquet    a journal that was long enough, sealed: its SHA-256 stands in the index
    .lock, writer.json                 who writes

An append is acknowledged once its frame is in a journal and its row in the index, both flushed. A journal counts until
the index says that its segment does, so a kill leaves one or the other. Healthy batches and suspect ones go into
journals of their own: what is to be kept longest shares no file with what goes first.
"""

import os
import re
from enum import StrEnum
from pathlib import Path

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.records.archived import BatchState

INDEX, LOCK, WRITER = "index.sqlite", ".lock", "writer.json"
JOURNALS, SEGMENTS = "journals", "segments"
JOURNAL, SEGMENT, DAMAGED, UNFINISHED = ".journal", ".parquet", ".damaged", ".tmp"
_PIECE = re.compile(r"(healthy|suspect)-(\d{6,})")
MIB = 2**20


class Kept(StrEnum):
    """Why a piece of the archive is there."""

    HEALTHY = "healthy"
    """One in so many, to compare with."""
    SUSPECT = "suspect"
    """Warned of, quarantined, or what training halted at."""

    @classmethod
    def of(cls, state: BatchState) -> "Kept":
        """Where a batch goes."""
        return cls.HEALTHY if state is BatchState.OK else cls.SUSPECT


class ArchiveSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept, in which portions, and for how long."""

    healthy_one_in: int = 20
    """Of healthy batches one in so many is kept, by its digest; all others are kept whole. 1 keeps all."""
    segment_bytes: int = 32 * MIB
    """A journal of this size is sealed before the next batch goes into it."""
    max_bytes: int | None = None
    """Beyond it the oldest segments are removed, healthy ones first; None keeps all."""
    max_age_s: float | None = None
    """Segments whose last batch is older are removed; None keeps all."""

    def __post_init__(self) -> None:
        """Settings that would keep nothing are refused."""
        require.whole(InvalidValue, "healthy_one_in", self.healthy_one_in, "1 keeps every healthy batch", 1)
        require.whole(InvalidValue, "segment_bytes", self.segment_bytes, "a segment needs a few KiB", 1024)
        if self.max_bytes is not None:
            least = 4 * self.segment_bytes
            rule = f"two journals and two segments must fit: at least {least}, or a smaller segment_bytes"
            require.whole(InvalidValue, "max_bytes", self.max_bytes, rule, least)
        if self.max_age_s is not None:
            require.real(InvalidValue, "max_age_s", self.max_age_s, "it is a time in seconds", 1.0)


def is_archive(directory: Path) -> bool:
    """Whether an archive was ever begun there."""
    return (directory / INDEX).is_file() or (directory / JOURNALS).is_dir()


def journal_path(directory: Path, piece: str) -> Path:
    """Where a piece is while it grows."""
    return directory / JOURNALS / f"{piece}{JOURNAL}"


def segment_path(directory: Path, piece: str) -> Path:
    """Where it is once it is sealed."""
    return directory / SEGMENTS / f"{piece}{SEGMENT}"


def pieces_on_disk(directory: Path, folder: str, suffix: str) -> list[str]:
    """Names of the pieces in one of the folders, oldest first."""
    found = [path.name.removesuffix(suffix) for path in (directory / folder).glob(f"*{suffix}")]
    return sorted((name for name in found if _PIECE.fullmatch(name)), key=number_of)


def piece_name(kept: Kept, number: int) -> str:
    """Numbers count through both kinds, so that they are in the order of time."""
    return f"{kept}-{number:06d}"


def number_of(piece: str) -> int:
    """Its place in the order of time."""
    match = _PIECE.fullmatch(piece)
    assert match is not None, f"{piece} is no name of a piece"
    return int(match[2])


def kept_of(piece: str) -> Kept:
    """Of which kind its batches are."""
    return Kept(piece.partition("-")[0])


def flush_directory(directory: Path) -> None:
    """A new name in it survives a loss of power only after this."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
