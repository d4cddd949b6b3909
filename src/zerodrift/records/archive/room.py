"""A disk that is full is told to whoever hands a batch in: under a name of its own, and before anything is acknowledged."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerodrift.core.errors import ArchiveFull, RecordError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """What goes wrong while `path` is written, as an error of ours."""
    shown = f"{path.parent.name}/{path.name}"
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ArchiveFull(
                f"{shown} cannot grow ({error.strerror}); all that was acknowledged is safe, and this batch is not kept: make room"
            ) from error
        raise RecordError(f"{shown} cannot be written ({error.strerror}); look at the disk") from error
