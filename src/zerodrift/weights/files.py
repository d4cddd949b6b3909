"""Tensors to files of an update and back again."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save

from zerodrift.core.errors import InvalidValue, RecordError
from zerodrift.records.archive.journal import write_all
from zerodrift.records.archive.layout import flush_directory
from zerodrift.records.archive.room import room_for
from zerodrift.weights.folder import INDEX, MANIFEST, WEIGHTS, Folder, TensorBytes, require_plain
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.update import FileRecord, UpdateManifest, encode_update

SHARD_BYTES = 2 * 2**30
"""Held in memory once more while it is written."""


def write_update(
    root: Path,
    name: str,
    update: UpdateManifest,
    state: Mapping[str, torch.Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> UpdateManifest:
    """Write `state` as the update `name` below `root`: there whole, and on the disk, or not there at all.

    Returns the manifest with its files.
    """
    require_plain(name, root)
    target, making = root / name, root / f".{name}.tmp"
    if target.exists():
        raise RecordError(f"{target} is there already; every update has a directory of its own")
    if manifest_of(state).tensors != update.weights.tensors:
        raise InvalidValue(f"the tensors for {target} are not those of the manifest; make it of them")
    shutil.rmtree(making, ignore_errors=True)
    with room_for(target):
        making.mkdir(parents=True)
        try:
            update = _write_all(making, update, state, shard_bytes)
            flush_directory(making)
            making.rename(target)
            flush_directory(root)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    return update


@contextmanager
def read_update(root: Path, name: str) -> Iterator[tuple[UpdateManifest, Iterator[tuple[str, torch.Tensor]]]]:
    """The manifest of the update `name` below `root`, and its tensors, one after the other, while it is open."""
    folder = Folder(root, name)
    try:
        update = folder.manifest()
        yield update, ((each.name, _tensor(each)) for each in folder.tensors(update))
    finally:
        folder.close()


def _tensor(read: TensorBytes) -> torch.Tensor:
    dtype = getattr(torch, read.stored.dtype.name)
    if not read.content:
        return torch.empty(read.stored.shape, dtype=dtype)
    # Copied once more, since a file may put its tensors at any byte and processors want them at round ones.
    return torch.frombuffer(bytearray(read.content), dtype=dtype).reshape(read.stored.shape)


def _write_all(
    directory: Path, update: UpdateManifest, state: Mapping[str, torch.Tensor], shard_bytes: int
) -> UpdateManifest:
    shards = _shards(state, shard_bytes)
    files, weight_map = [], dict[str, str]()
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = save({name: state[name].detach().cpu().contiguous().clone() for name in names})
        _write(directory / file, content)
        files.append(FileRecord(file, len(content), hashlib.sha256(content).hexdigest()))
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": update.nbytes}, "weight_map": weight_map}
        _write(directory / INDEX, msgspec.json.encode(index))
    update = msgspec.structs.replace(update, files=tuple(files))
    _write(directory / MANIFEST, encode_update(update))
    return update


def _shards(state: Mapping[str, torch.Tensor], shard_bytes: int) -> list[list[str]]:
    shards, size = [list[str]()], 0
    for name in sorted(state):
        nbytes = state[name].numel() * state[name].element_size()
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _write(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(handle, content)
    finally:
        os.close(handle)
