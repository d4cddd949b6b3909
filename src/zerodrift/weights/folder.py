"""Updates as files: one directory each below one root, and nothing is read that is not below it. Torch-free.

    ROOT/step-7/update.json                    the manifest, with size and sha256 of every file
               /model.safetensors              the tensors, or shards of them and
               /model.safetensors.index.json   in which shard each one is

Each directory and file is opened once, by its name below one that is open, and never through a link; what is verified and
used is the copy that was read then. Whoever may write below the root can make an update fail, and nothing else.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from zerodrift.core.errors import DigestMismatch, ModelError, NoWeights, TruncatedWeights, UnsafePath
from zerodrift.weights.safetensors_bytes import MOST_HEADER_BYTES, Stored, tensors_in
from zerodrift.weights.update import MOST_MANIFEST_BYTES, FileRecord, UpdateManifest, decode_update, few

MANIFEST, WEIGHTS, INDEX = "update.json", "model.safetensors", "model.safetensors.index.json"
KEPT = "weights"
"""Of an engine's versions: the directory of those that are kept, each under the identity of its manifest."""
_NAME = re.compile(r"[\w\-][\w.\-]{0,199}", re.ASCII)
_OURS = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.tmp")
"""What a kept version is called: whole, and while it is written."""
_LINKS = {errno.ELOOP, errno.ENOTDIR, errno.EMLINK}


def require_plain(name: object, root: Path) -> None:
    """`name` leads nowhere but to one directory below `root`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UnsafePath(
            f"an update lies in {str(name)[:80]!r}; give the plain name of a directory in {root}"
        )


class ShardIndex(msgspec.Struct):
    """In which shard each tensor is."""

    weight_map: dict[str, str]


class TensorBytes(NamedTuple):
    """One tensor out of a file, in memory of its own."""

    name: str
    stored: Stored
    content: memoryview


class Folder:
    """The directory of one update, open."""

    def __init__(self, root: Path, name: str) -> None:
        """`name` is a plain one; `root` is what was configured, and no link."""
        require_plain(name, root)
        self.where = f"{root}/{name}"
        with refused(str(root), "the root of updates"):
            root_handle = os.open(root, DIRECTORY)
        try:
            with refused(self.where, "an update"):
                self._handle = os.open(name, DIRECTORY, dir_fd=root_handle)
        finally:
            os.close(root_handle)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._handle)

    def manifest(self) -> UpdateManifest:
        """What it says that it holds."""
        content = self._read(MANIFEST, MOST_MANIFEST_BYTES)
        update = decode_update(bytes(content), f"{self.where}/{MANIFEST}")
        if not update.files:
            raise NoWeights(f"{self.where}/{MANIFEST} lists no files; write updates with `write_update`")
        return update

    def tensors(self, update: UpdateManifest) -> Iterator[TensorBytes]:
        """Every tensor of every file, each file whole and as the manifest has it."""
        shards = self._shards(update)
        seen: set[str] = set()
        for file in update.files:
            _check_room(file, update)
            content = self._read(file.name, file.nbytes)
            where = f"{self.where}/{file.name}"
            _check_file(file, content, where)
            stored = tensors_in(content, where)
            _check_names(stored.keys(), shards[file.name], seen, where)
            seen |= stored.keys()
            view = memoryview(content)
            for name, each in stored.items():
                yield TensorBytes(name, each, view[each.begin : each.end])

    def _shards(self, update: UpdateManifest) -> Mapping[str, set[str]]:
        """Names of the tensors in each file: of a single file those of the manifest, else as the index says."""
        names = {record.name for record in update.weights.tensors}
        files = [file.name for file in update.files]
        if files == [WEIGHTS]:
            return {WEIGHTS: names}
        where = f"{self.where}/{INDEX}"
        try:
            told = msgspec.json.decode(
                bytes(self._read(INDEX, MOST_MANIFEST_BYTES)), type=ShardIndex
            ).weight_map
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ModelError(f"{where} cannot be read: {error}") from error
        if told.keys() != names:
            raise ModelError(f"{where} and {MANIFEST} do not list the same: {few(told.keys() ^ names)}")
        if unknown := {shard for shard in told.values() if shard not in files}:
            raise UnsafePath(f"{where} names the shard {min(unknown)[:80]!r}, which {MANIFEST} does not list")
        return {file: {name for name, shard in told.items() if shard == file} for file in files}

    def _read(self, name: str, most: int) -> bytearray:
        """The whole file, copied; refused where it is no plain file, too long, or changes meanwhile."""
        where = f"{self.where}/{name}"
        with refused(where, "a file of an update"):
            handle = os.open(name, _FILE, dir_fd=self._handle)
        try:
            before = os.fstat(handle)
            if not stat.S_ISREG(before.st_mode):
                raise UnsafePath(f"{where} is no plain file; write updates with `write_update`")
            if before.st_size > most:
                raise TruncatedWeights(f"{where} has {before.st_size} bytes, and {most} at most are expected")
            content = bytearray(before.st_size)
            length = _fill(handle, content)
            after = os.fstat(handle)
        finally:
            os.close(handle)
        if length != before.st_size or _moment(before) != _moment(after):
            raise DigestMismatch(f"{where} changed while it was read; write a new directory for every update")
        return content


DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without waiting: to open a pipe would, until somebody writes to it.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _fill(handle: int, content: bytearray) -> int:
    """Read into `content`; returns how much there was, one more than fits where the file grew."""
    view, length = memoryview(content), 0
    while length < len(content) and (count := os.readv(handle, [view[length:]])):
        length += count
    return length + len(os.read(handle, 1))


def _moment(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _check_room(file: FileRecord, update: UpdateManifest) -> None:
    """Before memory is taken for it: the tensors are known to fit the model, and the file to hold them."""
    most = 8 + MOST_HEADER_BYTES + update.nbytes
    if file.nbytes > most:
        raise TruncatedWeights(
            f"{file.name} is to have {file.nbytes} bytes, and all tensors with a header have {most}"
        )


def _check_file(file: FileRecord, content: bytearray, where: str) -> None:
    if len(content) != file.nbytes:
        raise TruncatedWeights(f"{where} has {len(content)} bytes, and the manifest says {file.nbytes}")
    if (found := hashlib.sha256(content).hexdigest()) != file.sha256:
        raise DigestMismatch(
            f"{where} has sha256 {found}, and the manifest says {file.sha256}; it was damaged or mixed up"
        )


def _check_names(found: Iterable[str], expected: set[str], seen: set[str], where: str) -> None:
    names = set(found)
    if twice := names & seen:
        raise ModelError(f"{where} holds {few(twice)}, as another shard does; each tensor stands in one")
    if names != expected:
        raise ModelError(f"{where} does not hold what it should: {few(names ^ expected)} missing or too many")


def make_kept(directory: Path) -> Path:
    """Where the versions that are kept lie below `directory`: no link, since old ones are removed there."""
    kept = directory / KEPT
    kept.mkdir(exist_ok=True)
    with refused(str(kept), "the directory of versions that are kept"):
        os.close(os.open(kept, DIRECTORY))
    return kept


def sweep(kept: Path, named: Collection[str]) -> None:
    """Away with versions that a kill left half-written, or that are not `named`; what else lies there is somebody's own."""
    for path in kept.iterdir():
        if path.name not in named and _OURS.fullmatch(path.name) and not path.is_symlink() and path.is_dir():
            shutil.rmtree(path)


def check_kept(directory: Path, identity: str) -> None:
    """The weights of a version that is kept can be read, and are those that were."""
    folder = Folder(directory / KEPT, identity)
    try:
        update = folder.manifest()
        if update.identity != identity:
            raise DigestMismatch(
                f"{folder.where} holds {update.version!r}, whose manifest is another one; it was exchanged"
            )
        for _ in folder.tensors(update):
            pass
    finally:
        folder.close()


@contextmanager
def refused(where: str, what: str) -> Iterator[None]:
    """What the system says of a path, as an error of ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise NoWeights(f"{where} is not there; it should be {what}") from error
    except OSError as error:
        if error.errno in _LINKS:
            raise UnsafePath(
                f"{where} is a link, or not what it should be: {what}; nothing is read by it"
            ) from error
        raise ModelError(f"{where} cannot be opened ({error.strerror}); it should be {what}") from error
