"""A plain checkpoint below one root, as a trainer saves one: read without following a link, and copied out. Torch-free.

    ROOT/any/where/model.safetensors, or shards with model.safetensors.index.json

Nothing says what it should hold, so a flipped bit is not seen here; where `update.json` lies beside the weights, what it
promises is held against them, as `Folder` does.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from zerodrift.core.errors import ModelError, NoWeights, UnsafePath
from zerodrift.weights.folder import (
    DIRECTORY,
    INDEX,
    MANIFEST,
    WEIGHTS,
    Folder,
    ShardIndex,
    TensorBytes,
    refused,
)
from zerodrift.weights.safetensors_bytes import MOST_HEADER_BYTES, tensors_in
from zerodrift.weights.update import MOST_MANIFEST_BYTES, few

_PART = re.compile(r"\.?[\w\-][\w.\-]{0,198}", re.ASCII)
"""Hidden ones too: TRL saves adapters below `.vllm_lora`."""
_FILE = re.compile(r"[\w\-][\w.\-]{0,190}\.safetensors", re.ASCII)
MOST_PARTS = 16
LONGEST = 400
"""Characters of a path in a message."""


class CheckpointFolder(Folder):
    """One directory, open."""

    def __init__(self, root: Path, path: str) -> None:
        """`path` lies below `root`, absolute or from there; `root` is what was configured, and no link."""
        parts = parts_below(root, path)
        # The whole way from the root: a name that stands twice in it is how most of them are wrong.
        self.where = f"{root.name}/{'/'.join(parts)}"[:LONGEST]
        with refused(str(root), "the root of updates"):
            handle = os.open(root, DIRECTORY)
        for part in parts:
            try:
                with refused(self.where, "a checkpoint; paths are taken from below --weight-root"):
                    inner = os.open(part, DIRECTORY, dir_fd=handle)
            finally:
                os.close(handle)
            handle = inner
        self._handle = handle

    @property
    def has_manifest(self) -> bool:
        """Whether the trainer said what it holds."""
        return MANIFEST in self._there()

    def plain_tensors(self, most_bytes: int) -> Iterator[TensorBytes]:
        """Every tensor of every file; a file has at most `most_bytes`."""
        seen: set[str] = set()
        for file, names in self._files().items():
            content = self._read(file, 8 + MOST_HEADER_BYTES + most_bytes)
            where = f"{self.where}/{file}"
            stored = tensors_in(content, where)
            if names is not None and names != stored.keys():
                raise ModelError(f"{where} does not hold what the index says: {few(names ^ stored.keys())}")
            if twice := seen & stored.keys():
                raise ModelError(f"{where} holds {few(twice)}, as another file does")
            seen |= stored.keys()
            view = memoryview(content)
            for name, each in stored.items():
                yield TensorBytes(name, each, view[each.begin : each.end])

    def _there(self) -> list[str]:
        return os.listdir(self._handle)  # noqa: PTH208 (by its handle: the path may lead elsewhere by now)

    def _files(self) -> dict[str, set[str] | None]:
        """Files to read, each with the tensors that the index has in it."""
        there = self._there()
        if INDEX not in there:
            if WEIGHTS not in there:
                raise NoWeights(
                    f"{self.where} holds neither {WEIGHTS} nor {INDEX}; save the model with safetensors"
                )
            return {WEIGHTS: None}
        try:
            told = msgspec.json.decode(
                bytes(self._read(INDEX, MOST_MANIFEST_BYTES)), type=ShardIndex
            ).weight_map
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ModelError(f"{self.where}/{INDEX} cannot be read: {error}") from error
        if bad := [shard for shard in told.values() if not _FILE.fullmatch(shard)]:
            raise UnsafePath(
                f"{self.where}/{INDEX} names the shard {min(bad)[:80]!r}; shards are plain file names"
            )
        return {
            shard: {name for name, each in told.items() if each == shard}
            for shard in sorted({*told.values()})
        }


def parts_below(root: Path, path: str) -> tuple[str, ...]:
    """The way from `root` to `path`, which says nothing but plain names."""
    if path.startswith("/"):
        before = f"{root}/"
        if not path.startswith(before):
            raise UnsafePath(f"{path[:200]!r} is not below {root}, and nothing else is read")
        path = path.removeprefix(before)
    parts = tuple(path.rstrip("/").split("/"))
    if len(parts) > MOST_PARTS or not all(_PART.fullmatch(part) for part in parts):
        raise UnsafePath(
            f"{path[:200]!r} is no way below {root}: plain names, {MOST_PARTS} at most, without . or .. or links"
        )
    return parts
