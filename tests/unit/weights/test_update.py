"""Manifests of updates: what can be true, and nothing else."""

import hashlib

import msgspec
import pytest

from zerodrift.core.errors import DigestMismatch, InvalidValue, ModelError, OutOfOrder, ZerodriftError
from zerodrift.core.version import WeightVersion
from zerodrift.weights.manifest import MOST_BYTES, Manifest, TensorRecord
from zerodrift.weights.session import Stage, UpdateSession
from zerodrift.weights.update import (
    FileRecord,
    UpdateManifest,
    check_update,
    decode_update,
    encode_update,
)

HASH = "0123456789abcdef" * 2


def record(name="a", shape=(2, 3), dtype="float32", xxh3_128=HASH):
    return TensorRecord(name, shape, dtype, xxh3_128)


OWN = Manifest((record("a"), record("b")), (record("rope", (4,)),))
UPDATE = UpdateManifest(version="step 1", weights=OWN, tied={"head": "a"})


def changed(**fields):
    return msgspec.structs.replace(UPDATE, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "a\n"},
        {"name": "x" * 513},
        {"name": 5},
        {"shape": (-1,)},
        {"shape": (True,)},
        {"shape": (2.0,)},
        {"shape": [2]},
        {"shape": (1,) * 9},
        {"shape": (MOST_BYTES + 1,)},
        {"shape": (2**21, 2**21)},
        {"dtype": "float31"},
        {"dtype": "object"},
        {"dtype": None},
        {"xxh3_128": "0" * 31},
        {"xxh3_128": "X" * 32},
        {"xxh3_128": 7},
    ],
)
def test_a_tensor_that_cannot_exist_is_refused(fields):
    with pytest.raises(InvalidValue):
        record(**fields)


def test_the_largest_tensor_is_not():
    assert record(shape=(2**20, 2**20)).nbytes == MOST_BYTES
    assert record(shape=()).nbytes == 4
    assert record(shape=(0, 7)).nbytes == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"version": ""},
        {"version": "x" * 201},
        {"version": "a\nb"},
        {"version": None},
        {"parent": WeightVersion("step 1")},
        {"parent": "step 0"},
        {"weights": Manifest(())},
        {"schema": "zerodrift.update/2"},
        {"tied": {"a": "b"}},
        {"tied": {"head": "nowhere"}},
        {"tied": {"he ad": "a"}},
        {"files": (FileRecord("b.safetensors", 8, "0" * 64), FileRecord("a.safetensors", 8, "0" * 64))},
        {"files": (FileRecord("a.safetensors", 8, "0" * 64),) * 2},
    ],
)
def test_an_update_that_cannot_be_true_is_refused(fields):
    with pytest.raises(ZerodriftError):
        changed(**fields)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/x.safetensors", "x.bin", ".safetensors", ".x.safetensors", "a/b.safetensors"],
)
def test_a_file_is_a_plain_name(name):
    with pytest.raises(InvalidValue):
        FileRecord(name, 8, "0" * 64)


def test_names_that_stand_twice_are_refused_by_name():
    for tensors, buffers in (((record(), record()), ()), ((record(),), (record(),))):
        with pytest.raises(InvalidValue) as refused:
            Manifest(tensors, buffers)
        assert " a " in str(refused.value)


def test_a_version_is_its_label_and_the_digest_of_the_tensors_alone():
    assert UPDATE.weight_version == WeightVersion("step 1", Manifest(OWN.tensors).digest)
    assert UPDATE.digest == hashlib.sha256(msgspec.json.encode(UPDATE)).hexdigest()
    with_files = changed(files=(FileRecord("model.safetensors", 8, "0" * 64),))
    assert with_files.identity == UPDATE.identity == UPDATE.digest != with_files.digest


def test_bytes_come_back():
    assert decode_update(encode_update(UPDATE), "here") == UPDATE


def twice(content):
    return content.replace(b'"version":"step 1"', b'"version":"step 1","version":"step 1"')


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda content: content[:-5], InvalidValue),
        (lambda content: content + b" ", InvalidValue),
        (twice, InvalidValue),
        (lambda content: content.replace(b"step 1", b"step 2"), DigestMismatch),
        (lambda content: content.replace(b"float32", b"float33", 1), InvalidValue),
        (lambda content: content.replace(b'"shape":[2', b'"shape":[' + b"9" * 30, 1), InvalidValue),
        (lambda content: content.replace(b'"tied"', b'"code":1,"tied"'), InvalidValue),
        (lambda _: b"[" * 100_000, InvalidValue),
        (lambda _: b"\xff\xfe", InvalidValue),
        (lambda _: b"null", InvalidValue),
    ],
)
def test_bytes_that_are_no_manifest_or_lie_are_refused(damage, error):
    with pytest.raises(error):
        decode_update(damage(encode_update(UPDATE)), "here")


def weights(*names, buffers=OWN.buffers):
    return Manifest(tuple(record(name) for name in names), buffers)


@pytest.mark.parametrize(
    ("update", "named"),
    [
        (changed(weights=weights("a")), "b"),
        (changed(weights=weights("a", "b", "c")), "c"),
        (changed(weights=Manifest((record("a"), record("b", (3, 2))))), "b"),
        (changed(weights=Manifest((record("a"), record("b", dtype="bfloat16")))), "b"),
        (changed(tied={}), "head"),
        (changed(tied={"head": "b"}), "head"),
        (changed(weights=weights("a", "b", buffers=(record("rope", (4,), xxh3_128="0" * 32),))), "rope"),
        (changed(weights=weights("a", "b", buffers=(record("other"),))), "rope"),
    ],
)
def test_weights_for_another_model_are_refused_by_the_name_of_the_tensor(update, named):
    with pytest.raises(ModelError) as refused:
        check_update(update, OWN, {"head": "a"})
    assert named in str(refused.value).replace(update.version, "")


def test_weights_for_this_model_are_not():
    check_update(UPDATE, OWN, {"head": "a"})
    check_update(changed(weights=Manifest(OWN.tensors)), OWN, {"head": "a"})


def test_messages_come_in_their_order_and_once():
    session = UpdateSession(UPDATE)
    for stage in (Stage.COMMITTED, Stage.PUBLISHED, Stage.VERIFIED):
        with pytest.raises(OutOfOrder):
            session.move(stage)
    for name in ("b", "a"):
        assert session.expect(name).name == name
        session.took(name)
        with pytest.raises(OutOfOrder):
            session.expect(name)
    for name in ("c", "head", None):
        with pytest.raises(OutOfOrder):
            session.expect(name)
    session.move(Stage.VERIFIED)
    with pytest.raises(OutOfOrder):
        session.expect("a")
    for stage in (Stage.COMMITTED, Stage.PUBLISHED):
        session.move(stage)
    for stage in Stage:
        with pytest.raises(OutOfOrder):
            session.move(stage)


def test_what_was_refused_can_come_again():
    session = UpdateSession(UPDATE)
    session.expect("a")
    session.expect("a")
    assert set(session.missing) == {"a", "b"}
