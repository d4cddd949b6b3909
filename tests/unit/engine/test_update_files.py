"""Updates as files: whatever is torn, forged or led astray is refused by its name, and the old version serves on."""

import copy
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tests.unit.engine.update_history import broken_promises

from zerodrift.core.errors import (
    DigestMismatch,
    InvalidValue,
    ModelError,
    NonFinite,
    NoWeights,
    RecordError,
    TruncatedWeights,
    UnsafePath,
    ZerodriftError,
)
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.files import read_update, write_update
from zerodrift.weights.folder import INDEX, MANIFEST, WEIGHTS, Folder
from zerodrift.weights.history import Violation
from zerodrift.weights.of_model import update_of
from zerodrift.weights.update import FileRecord, UpdateManifest, decode_update, encode_update

PARAMS = SamplingParams(seed=3, max_tokens=3, ignore_eos=True)
HEAD = "lm_head.weight"


class Served(NamedTuple):
    loop: EngineLoop
    updates: Updates
    directory: Path

    def broken(self) -> list[Violation]:
        """Promises that are not kept any more."""
        return broken_promises(self.loop, self.updates, self.directory)

    def bits(self) -> tuple[float, ...]:
        self.loop.reset_cache()
        return self.loop.submit([5, 6, 7], PARAMS).result()[0].logprobs


@pytest.fixture(scope="module")
def served(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("versions")
    engine = Engine(tiny, num_blocks=16, block_size=4, version="old")
    with EngineLoop(engine) as loop, Updates(loop, directory) as updates:
        yield Served(loop, updates, directory)


@pytest.fixture(scope="module")
def trainer(tiny: Any) -> Any:
    model = copy.deepcopy(tiny)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)
    return model


@pytest.fixture
def root(trainer: Any, tmp_path: Path) -> Path:
    """Has the updates `one`, a single file, and `many`, in shards."""
    state = checkpoint_state(trainer)
    made = tmp_path / "root"
    made.mkdir()
    write_update(made, "one", update_of(trainer, "new"), state)
    write_update(made, "many", update_of(trainer, "new"), state, shard_bytes=20_000)
    return made


def test_shards_are_found_by_their_index(served: Served, root: Path, trainer: Any) -> None:
    assert len(list((root / "many").glob("*.safetensors"))) > 2
    found: dict[str, torch.Tensor] = {}
    for path in (root / "many").glob("*.safetensors"):
        found |= load_file(path)
    for name in ("one", "many"):
        with read_update(root, name) as (manifest, tensors):
            read = dict(tensors)
        assert read.keys() == found.keys() == checkpoint_state(trainer).keys()
        assert all(torch.equal(read[each], found[each]) for each in found)
        assert manifest.identity == update_of(trainer, "new").identity
    before = served.bits()
    label = f"from {root}"
    write_update(root, "sharded", update_of(trainer, label), checkpoint_state(trainer), shard_bytes=20_000)
    new = served.updates.from_directory(root, "sharded", "old")
    assert (new, served.bits() != before) == (served.loop.engine.version, True)
    served.updates.rollback(label)
    assert served.bits() == before


def test_an_update_is_written_whole_or_not_at_all(
    root: Path, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, update = checkpoint_state(trainer), update_of(trainer, "new")
    with pytest.raises(RecordError):
        write_update(root, "one", update, state)
    with pytest.raises(InvalidValue):
        write_update(root, "other", update, {**state, HEAD: state[HEAD] + 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError):
        write_update(root, "full", update, state)
    assert {path.name for path in root.iterdir()} == {"one", "many"}


# What is done to an update. Each says which name the refusal has to give.


def manifest_in(directory: Path) -> UpdateManifest:
    return decode_update((directory / MANIFEST).read_bytes(), "test")


def resealed(directory: Path) -> None:
    """As one who forges files and their digests would: the manifest agrees with the bytes again."""
    files = tuple(
        FileRecord(path.name, len(content), hashlib.sha256(content).hexdigest())
        for path in sorted(directory.glob("*.safetensors"))
        for content in [path.read_bytes()]
    )
    update = msgspec.structs.replace(manifest_in(directory), files=files)
    (directory / MANIFEST).write_bytes(encode_update(update))


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / WEIGHTS
    header, data = header_of(path.read_bytes())
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    resealed(directory)


def with_bytes(directory: Path, change: Callable[[bytes], bytes], *, seal: bool = False) -> None:
    path = directory / WEIGHTS
    path.write_bytes(change(path.read_bytes()))
    if seal:
        resealed(directory)


def flip(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


def zero_page(content: bytes) -> bytes:
    return content[:-8192] + bytes(4096) + content[-4096:]


def swapped(header: dict[str, Any]) -> None:
    one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    header[one], header[other] = header[other], header[one]


def twice(directory: Path) -> None:
    path = directory / WEIGHTS
    header, data = header_of(path.read_bytes())
    name = next(iter(header.keys() - {"__metadata__"}))
    text = json.dumps(header).encode()[:-1] + f', "{name}": {json.dumps(header[name])}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    resealed(directory)


def linked(path: Path) -> None:
    moved = path.parent.parent / f"{path.name}.moved"
    path.rename(moved)
    path.symlink_to(moved)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def indexed(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_bytes())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def first_shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def exchanged(directory: Path) -> None:
    one, other, *_ = sorted(directory.glob("*.safetensors"))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    resealed(directory)


def repeated(directory: Path) -> None:
    """A shard that holds what another holds."""
    one, other, *_ = sorted(directory.glob("*.safetensors"))
    other.write_bytes(one.read_bytes())
    resealed(directory)


def offset(header: dict[str, Any], by: int) -> None:
    begin, end = header[HEAD]["data_offsets"]
    header[HEAD]["data_offsets"] = [begin + by, end + by]


def promised(directory: Path) -> None:
    """A terabyte, which a sparse file would have: it is refused before anything is read."""
    files = (FileRecord(WEIGHTS, 2**40, "0" * 64),)
    forged = msgspec.structs.replace(manifest_in(directory), files=files)
    (directory / MANIFEST).write_bytes(encode_update(forged))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], type[ZerodriftError], str]] = {
    "cut off": ("one", lambda d: with_bytes(d, lambda c: c[:-10]), TruncatedWeights, WEIGHTS),
    "cut off and sealed": (
        "one",
        lambda d: with_bytes(d, lambda c: c[:-10], seal=True),
        TruncatedWeights,
        WEIGHTS,
    ),
    "empty": ("one", lambda d: with_bytes(d, lambda _: b""), TruncatedWeights, WEIGHTS),
    "too long": ("one", lambda d: with_bytes(d, lambda c: c + b"x"), TruncatedWeights, WEIGHTS),
    "too long and sealed": (
        "one",
        lambda d: with_bytes(d, lambda c: c + b"x", seal=True),
        TruncatedWeights,
        WEIGHTS,
    ),
    "a bit": ("one", lambda d: with_bytes(d, flip), DigestMismatch, WEIGHTS),
    "a bit, sealed": ("one", lambda d: with_bytes(d, flip, seal=True), DigestMismatch, "xxh3_128"),
    "a zeroed page": ("one", lambda d: with_bytes(d, zero_page), DigestMismatch, WEIGHTS),
    "a zeroed page, sealed": (
        "one",
        lambda d: with_bytes(d, zero_page, seal=True),
        DigestMismatch,
        "xxh3_128",
    ),
    "two layers swapped": ("one", lambda d: with_header(d, swapped), DigestMismatch, "mlp.up_proj.weight"),
    "a tensor missing": ("one", lambda d: with_header(d, lambda h: h.pop(HEAD)), TruncatedWeights, WEIGHTS),
    "a tensor too many": (
        "one",
        lambda d: with_header(
            d, lambda h: h.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        ),
        ModelError,
        "x",
    ),
    "renamed": ("one", lambda d: with_header(d, lambda h: h.update(x=h.pop(HEAD))), ModelError, HEAD),
    "dtype": ("one", lambda d: with_header(d, lambda h: h[HEAD].update(dtype="I32")), ModelError, HEAD),
    "unknown dtype": (
        "one",
        lambda d: with_header(d, lambda h: h[HEAD].update(dtype="F4")),
        TruncatedWeights,
        HEAD,
    ),
    "shape": ("one", lambda d: with_header(d, lambda h: h[HEAD]["shape"].reverse()), ModelError, HEAD),
    "absurd shape": (
        "one",
        lambda d: with_header(d, lambda h: h[HEAD].update(shape=[2**47, 2**47])),
        TruncatedWeights,
        HEAD,
    ),
    "negative shape": (
        "one",
        lambda d: with_header(d, lambda h: h[HEAD].update(shape=[-61, -32])),
        TruncatedWeights,
        HEAD,
    ),
    "overlap": ("one", lambda d: with_header(d, lambda h: offset(h, -4)), TruncatedWeights, HEAD),
    "a gap": ("one", lambda d: with_header(d, lambda h: offset(h, 4)), TruncatedWeights, ""),
    "a name twice": ("one", twice, TruncatedWeights, WEIGHTS),
    "header bomb": (
        "one",
        lambda d: with_bytes(d, lambda c: struct.pack("<Q", 2**63) + c[8:], seal=True),
        TruncatedWeights,
        WEIGHTS,
    ),
    "deep header": (
        "one",
        lambda d: with_bytes(d, lambda _: struct.pack("<Q", 200_000) + b"[" * 200_000, seal=True),
        TruncatedWeights,
        WEIGHTS,
    ),
    "a terabyte": ("one", promised, TruncatedWeights, WEIGHTS),
    "no safetensors": (
        "one",
        lambda d: with_bytes(d, lambda _: b"\x80\x04K\x01.", seal=False),
        TruncatedWeights,
        WEIGHTS,
    ),
    "file is a link": ("one", lambda d: linked(d / WEIGHTS), UnsafePath, WEIGHTS),
    "manifest is a link": ("one", lambda d: linked(d / MANIFEST), UnsafePath, MANIFEST),
    "index is a link": ("many", lambda d: linked(d / INDEX), UnsafePath, INDEX),
    "directory is a link": ("one", linked, UnsafePath, "one"),
    "a pipe": ("one", lambda d: piped(d / WEIGHTS), UnsafePath, WEIGHTS),
    "a directory": ("one", lambda d: (d / WEIGHTS).unlink() or (d / WEIGHTS).mkdir(), UnsafePath, WEIGHTS),
    "file missing": ("one", lambda d: (d / WEIGHTS).unlink(), NoWeights, WEIGHTS),
    "shard missing": ("many", lambda d: first_shard(d).unlink(), NoWeights, "model-00001"),
    "index missing": ("many", lambda d: (d / INDEX).unlink(), NoWeights, INDEX),
    "manifest missing": ("one", lambda d: (d / MANIFEST).unlink(), NoWeights, MANIFEST),
    "manifest without files": (
        "one",
        lambda d: (d / MANIFEST).write_bytes(
            encode_update(msgspec.structs.replace(manifest_in(d), files=()))
        ),
        NoWeights,
        MANIFEST,
    ),
    "manifest edited": (
        "one",
        lambda d: (d / MANIFEST).write_bytes((d / MANIFEST).read_bytes().replace(b'"new"', b'"now"')),
        DigestMismatch,
        MANIFEST,
    ),
    "index leads out": (
        "many",
        lambda d: indexed(d, lambda m: m.update({HEAD: "../x.safetensors"})),
        UnsafePath,
        "../x",
    ),
    "index is absolute": (
        "many",
        lambda d: indexed(d, lambda m: m.update({HEAD: "/etc/passwd"})),
        UnsafePath,
        "/etc",
    ),
    "index lacks a tensor": ("many", lambda d: indexed(d, lambda m: m.pop(HEAD)), ModelError, HEAD),
    "index moves a tensor": (
        "many",
        lambda d: indexed(d, lambda m: m.update({HEAD: max(m.values())})),
        ModelError,
        HEAD,
    ),
    "index is no JSON": ("many", lambda d: (d / INDEX).write_text("{"), ModelError, INDEX),
    "shards exchanged": ("many", exchanged, ModelError, "model-00001"),
    "a shard twice": ("many", repeated, ModelError, "model-00002"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_torn_or_forged_is_refused_by_name(served: Served, root: Path, kind: str) -> None:
    name, damage, error, named = DAMAGES[kind]
    before, version = served.bits(), served.updates.current
    damage(root / name)
    with pytest.raises(error) as refused:
        served.updates.from_directory(root, name, "old")
    assert type(refused.value) is error
    assert named in str(refused.value)
    assert (served.updates.current, served.loop.engine.version) == (version, version)
    assert served.bits() == before
    assert served.broken() == []


def test_undamaged_they_are_read(root: Path, trainer: Any) -> None:
    """What the damages above are held against."""
    for name in ("one", "many"):
        with read_update(root, name) as (_, tensors):
            read = dict(tensors)
        assert all(torch.equal(read[each], tensor) for each, tensor in checkpoint_state(trainer).items())


@pytest.mark.parametrize(
    "name", ["../root/one", "/etc", "one/", "./one", "..", ".", "", "one/../one", "o\x00ne", ".hidden", None]
)
def test_an_update_is_a_plain_name(served: Served, root: Path, name: Any) -> None:
    with pytest.raises(UnsafePath):
        served.updates.from_directory(root, name, "old")


def test_a_root_that_is_a_link_is_refused(served: Served, root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(UnsafePath):
        served.updates.from_directory(link, "one", "old")
    with pytest.raises(NoWeights):
        served.updates.from_directory(tmp_path / "nowhere", "one", "old")
    assert served.broken() == []


def test_nan_with_valid_digests_is_refused(served: Served, root: Path, trainer: Any) -> None:
    before, model = served.bits(), copy.deepcopy(trainer)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    write_update(root, "nan", update_of(model, "nan"), checkpoint_state(model))
    with pytest.raises(NonFinite) as refused:
        served.updates.from_directory(root, "nan", "old")
    assert HEAD in str(refused.value)
    assert (served.updates.current.label, served.bits(), served.broken()) == ("old", before, [])


def test_another_manifest_than_was_announced_is_refused(served: Served, root: Path) -> None:
    digest = manifest_in(root / "one").digest
    with pytest.raises(DigestMismatch):
        served.updates.from_directory(root, "many", "old", digest=digest)
    assert (served.updates.current.label, served.broken()) == ("old", [])


@pytest.mark.parametrize("change", ["overwritten", "grown", "shrunk"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    served: Served, root: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path, real = root / "one" / WEIGHTS, os.readv
    size = path.stat().st_size

    def meddled(handle: int, buffers: list[memoryview]) -> int:
        if os.fstat(handle).st_size != size:
            return real(handle, buffers)
        # Half is read, and then somebody writes.
        count = real(handle, [buffers[0][: size // 2]])
        with path.open("r+b") as file:
            if change == "overwritten":
                file.seek(8)
                file.write(b"{")  # the very byte that is there: only times tell
                os.utime(path, ns=(1, 1))
            else:
                file.truncate(size + 5 if change == "grown" else size - 5)
        return count

    before = served.bits()
    monkeypatch.setattr(os, "readv", meddled)
    with pytest.raises(DigestMismatch) as refused:
        served.updates.from_directory(root, "one", "old")
    assert WEIGHTS in str(refused.value)
    monkeypatch.undo()
    assert (served.bits(), served.broken()) == (before, [])


def test_what_was_read_does_not_change_with_the_file(root: Path, trainer: Any) -> None:
    """Of a map it would: transformers hands out tensors that follow the file."""
    with read_update(root, "one") as (_, tensors):
        name, first = next(tensors)
        with (root / "one" / WEIGHTS).open("r+b") as file:
            file.seek(2000)
            file.write(bytes(50_000))
        rest = dict(tensors)
    expected = checkpoint_state(trainer)
    assert torch.equal(first, expected[name])
    assert all(torch.equal(tensor, expected[each]) for each, tensor in rest.items())


def test_nothing_stays_open(served: Served, root: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("one", "many", "none"):
        with pytest.raises(ZerodriftError):
            served.updates.from_directory(root, name, "not current")
    with pytest.raises(UnsafePath):
        Folder(root, "../x")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize("name", ["../escaped", "../../escaped", "/tmp/escaped", "a/b", "..", "", ".hidden"])
def test_an_update_is_written_below_its_root_alone(root: Path, trainer: Any, name: str) -> None:
    with pytest.raises(UnsafePath):
        write_update(root, name, update_of(trainer, "new"), checkpoint_state(trainer))
    assert {path.name for path in root.iterdir()} == {"one", "many"}
    assert {path.name for path in root.parent.iterdir()} == {"root"}
