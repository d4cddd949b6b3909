"""One writer at a time: two processes that append to one file would leave a third thing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from zerodrift.core.errors import RecordError


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
