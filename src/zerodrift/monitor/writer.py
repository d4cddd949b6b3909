"""Does anybody still write a monitor's directory? What a page that shows it asks, and must not get in the way of.

ended      the monitor was closed, or its training said that it is over
writing    a monitor holds the directory
stopped    nobody holds it, and nobody said so: killed, or at its end without `close()`
"""

from enum import StrEnum
from pathlib import Path

from zerodrift.records.lock import is_held

LOCK, ENDED = ".lock", "ended"


class Writer(StrEnum):
    """What became of it."""

    WRITING = "writing"
    ENDED = "ended"
    STOPPED = "stopped"


def writer_of(directory: Path) -> Writer | None:
    """None where nothing tells: no monitor's directory, or a disk without locks."""
    if (directory / ENDED).is_file():
        return Writer.ENDED
    held = is_held(directory / LOCK)
    return None if held is None else Writer.WRITING if held else Writer.STOPPED
