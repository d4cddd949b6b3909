"""One writer at a time: two processes that append to one file would leave a third thing."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from zerodrift.core.errors import RecordError

ASKED_S = 0.5
"""That a writer waits for a lock which somebody may just be asking about."""


@contextmanager
def only_writer(path: Path, of: Path) -> Iterator[None]:
    """Hold the lock file `path` for as long as `of` is written; the system lets go of it if we are killed."""
    try:
        held = FileLock(path).acquire(timeout=0)
    except Timeout as error:
        raise RecordError(
            f"another process is writing {of}; wait until it is done, or choose another --out"
        ) from error
    with held:
        yield


def is_held(path: Path) -> bool | None:
    """Whether a process has this lock file; None where it is not there, or cannot be told.

    Asked by the way: for some microseconds the lock is ours, shared, so whoever takes it waits `ASKED_S` before it gives up.
    """
    if sys.platform == "win32":
        return None  # pragma: no cover - it has no flock
    import fcntl  # noqa: PLC0415 - not everywhere

    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False
