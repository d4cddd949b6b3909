import hashlib

import msgspec
import pytest
import torch

from zerodrift.core.errors import InvalidValue
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.manifest import Manifest, ManifestDiff


def state():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(4, 4, generator=generator) for name in ("b.weight", "a.weight", "c.weight")}


def test_a_manifest_is_a_sorted_listing_and_its_digest_the_sha256_of_that():
    manifest = manifest_of(state())
    assert [record.name for record in manifest.tensors] == ["a.weight", "b.weight", "c.weight"]
    assert {(record.shape, record.dtype) for record in manifest.tensors} == {((4, 4), "float32")}
    assert manifest_of(dict(reversed(state().items()))) == manifest
    assert manifest.digest == hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest


@pytest.mark.parametrize(
    ("fault", "difference"),
    [
        (
            lambda s: s["a.weight"].view(torch.int32)[0, 0].bitwise_xor_(1),
            {"changed": {"a.weight": "content"}},
        ),
        (lambda s: s["a.weight"].zero_(), {"changed": {"a.weight": "content"}}),
        (
            lambda s: s.update({"a.weight": s["b.weight"], "b.weight": s["a.weight"]}),
            {"changed": {"a.weight": "content", "b.weight": "content"}},
        ),
        (
            lambda s: s.update({"a.weight": s["a.weight"].bfloat16()}),
            {"changed": {"a.weight": "dtype float32 became bfloat16"}},
        ),
        (
            lambda s: s.update({"a.weight": s["a.weight"].reshape(2, 8)}),
            {"changed": {"a.weight": "shape [4, 4] became [2, 8]"}},
        ),
        (lambda s: s.pop("b.weight"), {"missing": ("b.weight",)}),
        (lambda s: s.update({"d.weight": torch.ones(1)}), {"extra": ("d.weight",)}),
        (
            lambda s: s.update({"lm_head.weight": s.pop("b.weight")}),
            {"missing": ("b.weight",), "extra": ("lm_head.weight",)},
        ),
    ],
    ids=["bit", "zeroed", "swapped", "dtype", "shape", "missing", "extra", "renamed"],
)
def test_faults_are_named(fault, difference):
    """Those that safetensors loads in silence."""
    sound, damaged = state(), state()
    fault(damaged)
    before, after = manifest_of(sound), manifest_of(damaged)
    found = before.diff(after)
    assert msgspec.structs.asdict(found) == {"missing": (), "extra": (), "changed": {}, **difference}
    assert found
    assert before.digest != after.digest
    assert all(name in str(found) for part in difference.values() for name in part)


def test_a_difference_reads_as_a_sentence():
    found = manifest_of(state()).diff(manifest_of(state()))
    assert not found
    assert str(found) == "no difference"
    found = ManifestDiff(missing=("a",), extra=("b", "c"), changed={"d": "content"})
    assert str(found) == "missing: a; extra: b, c; changed: d (content)"


def test_buffers_are_covered():
    plain = manifest_of(state())
    buffered = manifest_of(state(), {"rotary.inv_freq": torch.ones(2)})
    moved = manifest_of(state(), {"rotary.inv_freq": torch.ones(2) * 2})
    assert len({plain.digest, buffered.digest, moved.digest}) == 3
    assert buffered.diff(moved).changed == {"rotary.inv_freq": "content"}
    assert buffered.diff(plain).missing == ("rotary.inv_freq",)


def test_a_manifest_out_of_order_is_refused():
    records = manifest_of(state()).tensors
    with pytest.raises(InvalidValue):
        Manifest(tuple(reversed(records)))
    with pytest.raises(InvalidValue):
        Manifest(records, (records[0], records[0]))
