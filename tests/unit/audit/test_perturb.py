from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zerodrift import models
from zerodrift.audit.perturb import (
    SHARES,
    check_room,
    perturbed,
    write_checkpoint,
)
from zerodrift.backends.reference import ReferenceBackend, load_reference
from zerodrift.core.errors import OutOfMemory


@pytest.fixture(scope="module")
def model():
    return models.load("testbed:llama")


def test_every_tensor_moves_by_a_share_of_its_spread(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = perturbed(model, 1).new
    for name, tensor in changed.state_dict().items():
        old = before[name]
        moved = float((tensor - old).std() / old.std())
        assert moved == pytest.approx(SHARES[0], rel=0.2), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_change_is_known_by_its_seed(model):
    one, same, other = (perturbed(model, seed).new for seed in (1, 1, 2))
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize(("name", "gain"), [("llama", 3.0), ("gemma3", 4.0)])
def test_a_constant_tensor_moves_by_its_size(name, gain):
    """A fresh norm is all ones, or all zeros where its gain is 1 + w: neither has a spread."""
    model = models.load(f"testbed:{name}")
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
        model.model.layers[0].input_layernorm.weight.fill_(0.0)
    changed = perturbed(model, 0).new
    moved = (changed.model.norm.weight - 3.0).detach().abs().mean()
    assert float(moved) == pytest.approx(0.8 * SHARES[0] * gain, rel=0.5)
    fresh = changed.model.layers[0].input_layernorm.weight.detach().abs().mean()
    assert bool(fresh > 0) == (name == "gemma3")


@pytest.mark.parametrize("spec", ["testbed:llama", "testbed:qwen3", "testbed:qwen3-moe"])
def test_a_written_checkpoint_loads_bit_for_bit(spec, tmp_path):
    original = models.materialise(spec, tmp_path / "a")
    (original / "model.safetensors.index.json").write_text("{}")
    changed = perturbed(load_reference(spec).model, 3).new
    assert changed.dtype is torch.float64
    directory = write_checkpoint(changed, original, tmp_path / "deep" / "b")
    loaded = load_reference(directory).model
    assert loaded.dtype is torch.float64
    for (name, one), (twin, other) in zip(
        changed.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert name == twin
        assert torch.equal(one, other), name
    assert (
        load_file(directory / "model.safetensors").keys() == load_file(original / "model.safetensors").keys()
    )
    assert (directory / "config.json").read_bytes() == (original / "config.json").read_bytes()
    assert not (directory / "model.safetensors.index.json").exists(), "it would name files that are not there"
    assert ReferenceBackend(directory).tokenizer("the") == ReferenceBackend(spec).tokenizer("the")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_pushed_is_what_the_checkpoint_s_own_dtype_holds(dtype, tmp_path):
    """An engine in bf16 would round numbers that are sent in fp32, and be off by the rounding of every weight."""
    original = models.materialise("testbed:llama", tmp_path / "a", dtype=dtype)
    reference = ReferenceBackend(original, dtype="float32")
    changed = perturbed(reference.model, 3, saved=reference.saved_dtype).new
    assert changed.dtype is torch.float32
    directory = write_checkpoint(changed, original, tmp_path / "b", reference.saved_dtype)
    written = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
    for name, tensor in changed.named_parameters():
        assert torch.equal(tensor, written[name].float()), name
    rounded = changed.model.norm.weight.bfloat16().float()
    assert torch.equal(rounded, changed.model.norm.weight) == (dtype == "bfloat16"), "the control"


# --- memory -----------------------------------------------------------------------------------------------------


def test_a_larger_change_takes_the_place_of_a_smaller_one(model):
    tried: list[Any] = []
    changed = perturbed(model, 1, lambda moved: bool(tried.append(moved.new))).new
    assert [each is changed for each in tried] == [True, True], "one copy, whatever the share"
    moved, least = (
        (each.model.norm.weight - model.model.norm.weight).detach()
        for each in (changed, perturbed(model, 1).new)
    )
    assert (moved.std() / least.std()).item() == pytest.approx(SHARES[-1] / SHARES[0], rel=0.01)


@pytest.mark.parametrize("spec", ["testbed:llama", "testbed:qwen3-moe"])
def test_a_large_checkpoint_is_written_in_several_files(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("zerodrift.audit.perturb.SHARD_BYTES", 2**18)
    changed = perturbed(load_reference(spec).model, 3).new
    directory = write_checkpoint(changed, models.materialise(spec, tmp_path / "a"), tmp_path / "b")
    files = list(directory.glob("*.safetensors"))
    assert len(files) > 2
    biggest = max(4 * each.numel() for each in changed.parameters())
    assert max(file.stat().st_size for file in files) < max(2**18, biggest) + 2**14
    loaded = load_reference(directory).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in changed.state_dict().items())


@pytest.mark.parametrize(("free", "fits"), [(None, True), (2**40, True), (2**10, False)])
def test_a_second_copy_that_does_not_fit_is_refused_before_it_is_made(model, monkeypatch, free, fits):
    monkeypatch.setattr("zerodrift.audit.perturb.free_on_host", lambda: free)
    if fits:
        assert check_room(model) == "", "a tiny model is nothing to plan for"
        monkeypatch.setattr("zerodrift.audit.perturb.TOLD", 1)
        assert "GiB" in check_room(model)
        return
    with pytest.raises(OutOfMemory):
        check_room(model)
