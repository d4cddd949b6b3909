from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from zerodrift import models
from zerodrift.audit.perturb import (
    SHARES,
    GroupedWeights,
    Grouping,
    by_kind,
    by_layer,
    by_role,
    check_room,
    perturbed,
    write_checkpoint,
)
from zerodrift.backends.reference import ReferenceBackend, load_reference
from zerodrift.core.completion import Completion
from zerodrift.core.errors import OutOfMemory
from zerodrift.models.family.llama import LLAMA

Make = Callable[..., Completion]


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load("testbed:llama")


@pytest.fixture(scope="module")
def weights(model: Any) -> GroupedWeights:
    return GroupedWeights(model, perturbed(model, 1))


def test_kinds() -> None:
    names = ("model.layers.1.self_attn.q_proj.bias", "model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    assert [by_kind(LLAMA, name) for name in names] == ["biases", "norms", "matrices"]


@pytest.mark.parametrize(
    ("name", "layer", "role"),
    [
        ("model.layers.3.mlp.gate_proj.weight", "layer 3", "gate_proj"),
        ("model.layers.12.self_attn.q_proj.bias", "layer 12", "q_proj"),
        ("model.layers.0.input_layernorm.weight", "layer 0", "norms"),
        ("model.embed_tokens.weight", "embed_tokens", "embed_tokens"),
        ("model.norm.weight", "norm", "norms"),
        ("lm_head.weight", "lm_head", "lm_head"),
    ],
)
def test_groups_are_what_an_update_forgets(name: str, layer: str, role: str) -> None:
    assert (by_layer(LLAMA, name), by_role(LLAMA, name)) == (layer, role)


def test_every_tensor_moves_by_a_share_of_its_spread(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = perturbed(model, 1)
    for name, tensor in changed.state_dict().items():
        old = before[name]
        moved = float((tensor - old).std() / old.std())
        assert moved == pytest.approx(SHARES[0], rel=0.2), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_change_is_known_by_its_seed(model: Any) -> None:
    one, same, other = perturbed(model, 1), perturbed(model, 1), perturbed(model, 2)
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize(("name", "gain"), [("llama", 3.0), ("gemma3", 4.0)])
def test_a_constant_tensor_moves_by_its_size(name: str, gain: float) -> None:
    """A fresh norm is all ones, or all zeros where its gain is 1 + w: neither has a spread."""
    model = models.load(f"testbed:{name}")
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
        model.model.layers[0].input_layernorm.weight.fill_(0.0)
    changed = perturbed(model, 0)
    moved = (changed.model.norm.weight - 3.0).detach().abs().mean()
    assert float(moved) == pytest.approx(0.8 * SHARES[0] * gain, rel=0.5)
    fresh = changed.model.layers[0].input_layernorm.weight.detach().abs().mean()
    assert bool(fresh > 0) == (name == "gemma3")


@pytest.mark.parametrize("spec", ["testbed:llama", "testbed:qwen3", "testbed:qwen3-moe"])
def test_a_written_checkpoint_loads_bit_for_bit(spec: str, tmp_path: Path) -> None:
    original = models.materialise(spec, tmp_path / "a")
    (original / "model.safetensors.index.json").write_text("{}")
    changed = perturbed(load_reference(spec).model, 3)
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


@pytest.mark.parametrize("grouping", [by_layer, by_role])
def test_without_some_groups_those_are_old_and_the_rest_is_new(
    weights: GroupedWeights, grouping: Grouping
) -> None:
    groups = weights.groups(grouping)
    absent = groups[1]
    mixed = weights.without(grouping, [absent]).state_dict()
    old, new = weights.old.state_dict(), weights.new.state_dict()
    for name, tensor in mixed.items():
        assert torch.equal(tensor, old[name] if grouping(LLAMA, name) == absent else new[name]), name


def test_groups_come_in_the_order_of_the_forward(weights: GroupedWeights) -> None:
    assert weights.groups(by_layer) == ("embed_tokens", "layer 0", "layer 1", "norm", "lm_head")
    assert weights.groups(by_role)[:3] == ("embed_tokens", "q_proj", "k_proj")


def test_scores_are_those_of_the_outputs(weights: GroupedWeights, completion: Make) -> None:
    outputs = [completion((0, 5, 6), (7, 8)), completion((0, 9), (10, 11, 12))]
    scores = weights.score(weights.old, outputs)
    expected = []
    for each in outputs:
        with torch.no_grad():
            rows = torch.log_softmax(weights.old(torch.tensor([each.sequence])).logits[0], -1)
        for place, token in enumerate(each.token_ids, start=len(each.prompt_token_ids)):
            expected.append(float(rows[place - 1, token]))
    assert scores == pytest.approx(expected, abs=1e-5)


def test_effects_of_single_groups_add_up_to_that_of_all(weights: GroupedWeights, completion: Make) -> None:
    """To first order, which is what a share of two percent is chosen for."""
    rng = np.random.default_rng(0)
    outputs = [completion(rng.integers(4, 500, 20).tolist(), rng.integers(4, 500, 12).tolist())]
    at_new, at_old = weights.score(weights.new, outputs), weights.score(weights.old, outputs)
    effects = weights.effects(by_layer, outputs, at_new)
    tied = effects.pop("lm_head")
    assert tied == pytest.approx(effects["embed_tokens"], abs=1e-9), "one tensor under two names"
    total = np.sum(list(effects.values()), axis=0)
    whole = at_new - at_old
    assert np.corrcoef(total, whole)[0, 1] > 0.95
    assert np.abs(whole).mean() > 1e-2


# --- memory -----------------------------------------------------------------------------------------------------


def test_a_mix_of_two_models_holds_no_weight_of_its_own(weights: GroupedWeights) -> None:
    """Each was a third copy: 94 GiB for a model of 16."""
    theirs = {each.data_ptr() for model in (weights.old, weights.new) for each in model.parameters()}
    before = [each.clone() for each in weights.new.parameters()]
    mixed = weights.without(by_layer, ["layer 0"])
    assert {each.data_ptr() for each in mixed.parameters()} <= theirs
    assert all(torch.equal(a, b) for a, b in zip(before, weights.new.parameters(), strict=True))


def test_a_larger_change_takes_the_place_of_a_smaller_one(model: Any) -> None:
    tried: list[Any] = []
    changed = perturbed(model, 1, lambda moved: bool(tried.append(moved)))
    assert [each is changed for each in tried] == [True, True], "one copy, whatever the share"
    moved, least = (
        (each.model.norm.weight - model.model.norm.weight).detach() for each in (changed, perturbed(model, 1))
    )
    assert (moved.std() / least.std()).item() == pytest.approx(SHARES[-1] / SHARES[0], rel=0.01)


@pytest.mark.parametrize("spec", ["testbed:llama", "testbed:qwen3-moe"])
def test_a_large_checkpoint_is_written_in_several_files(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerodrift.audit.perturb.SHARD_BYTES", 2**18)
    changed = perturbed(load_reference(spec).model, 3)
    directory = write_checkpoint(changed, models.materialise(spec, tmp_path / "a"), tmp_path / "b")
    files = list(directory.glob("*.safetensors"))
    assert len(files) > 2
    biggest = max(4 * each.numel() for each in changed.parameters())
    assert max(file.stat().st_size for file in files) < max(2**18, biggest) + 2**14
    loaded = load_reference(directory).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in changed.state_dict().items())


@pytest.mark.parametrize(("free", "fits"), [(None, True), (2**40, True), (2**10, False)])
def test_a_second_copy_that_does_not_fit_is_refused_before_it_is_made(
    model: Any, monkeypatch: pytest.MonkeyPatch, free: int | None, fits: bool
) -> None:
    monkeypatch.setattr("zerodrift.audit.perturb.free_on_host", lambda: free)
    if fits:
        assert check_room(model) == "", "a tiny model is nothing to plan for"
        monkeypatch.setattr("zerodrift.audit.perturb.TOLD", 1)
        assert "GiB" in check_room(model)
        return
    with pytest.raises(OutOfMemory):
        check_room(model)
