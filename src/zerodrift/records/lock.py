"""One writer at a time: two processes that append to one file would leave a third thing."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerodrift.core.errors import RecordError


@contextmanager
def only_writer(path: Path, of: Path) -> Iterator[None]:
    """Hold the lock file `path` for as long as `of` is written; the system lets go of it if we are killed."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(
                f"another process is writing {of}; wait until it is done, or choose another --out"
            ) from error
        yield
