"""How much memory is there, how much will be needed, and was it memory that ran out?"""

import errno
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
LIMIT, IN_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
GIB = 2**30
_HOST_MESSAGES = ("not enough memory", "can't allocate memory", "Cannot allocate memory")


def free_on_host() -> int | None:
    """Bytes that can be taken without swapping, by the machine and by the container; None where nobody says."""
    known = [bytes_ for bytes_ in (_of_machine(), _of_container()) if bytes_ is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {name: rest for name, _, rest in (line.partition(":") for line in lines)}.get("MemAvailable")
    return None if kib is None else int(kib.split()[0]) * 1024


def _of_container() -> int | None:
    try:
        limit, in_use = LIMIT.read_text(encoding="ascii"), IN_USE.read_text(encoding="ascii")
    except OSError:
        return None
    return int(limit) - int(in_use) if limit.strip().isdecimal() else None


def in_gib(size: int) -> str:
    """As people say it."""
    return f"{size / GIB:.1f} GiB"


def ran_out(error: BaseException) -> bool:
    """Whether it says that there was no memory left: Python's own, and torch's on a host and on an accelerator.

    By name, because whoever asks may have no torch.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_MESSAGES)
