"""The key that receipts are sealed with: 32 random bytes in a file that nobody but its owner can read. Torch-free."""

import os
import secrets
import stat
from pathlib import Path

from zerodrift.core.errors import UnsafePath

MODE = 0o600
NBYTES = 32


def create_key(path: Path) -> bytes:
    """A new key at `path`, which is not there yet."""
    key = secrets.token_bytes(NBYTES)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise UnsafePath(
            f"no receipt key can be made at {path} ({error.strerror}); name a new file in a directory of yours"
        ) from error
    with os.fdopen(handle, "wb") as file:
        # Whatever umask says.
        os.fchmod(handle, MODE)
        file.write(key.hex().encode() + b"\n")
        file.flush()
        os.fsync(handle)
    return key


def read_key(path: Path) -> bytes:
    """The key in `path`: a plain file of this user with mode 0600, and no link to one."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UnsafePath(
            f"the receipt key {path} cannot be opened ({error.strerror}); it is a plain file and no link: "
            "make one with `zerodrift sync key PATH`"
        ) from error
    try:
        _check_file(os.fstat(handle), path)
        content = os.read(handle, 2 * NBYTES + 2)
    finally:
        os.close(handle)
    try:
        key = bytes.fromhex(content.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        key = b""
    if len(key) != NBYTES:
        raise UnsafePath(
            f"{path} holds no receipt key, which is {2 * NBYTES} hex digits; make one with `zerodrift sync key`"
        )
    return key


def _check_file(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise UnsafePath(
            f"the receipt key {path} is no plain file with one name; make one with `zerodrift sync key PATH`"
        )
    if (mode := stat.S_IMODE(found.st_mode)) != MODE or found.st_uid != os.geteuid():
        raise UnsafePath(
            f"the receipt key {path} has mode {mode:04o} and owner {found.st_uid}; whoever can read it can make receipts: "
            f"chmod 600 {path}, as its owner"
        )
