"""Mixtures of two models, derivatives by the share of an update, and the parts that have a name."""

import numpy as np
import pytest
import torch

from zerodrift import models
from zerodrift.audit.perturb import perturbed
from zerodrift.audit.update.groups import by_kind, by_layer, by_role
from zerodrift.audit.update.parts import WHOLE, Part, grouped, parts_of
from zerodrift.audit.update.weights import Move
from zerodrift.models.family.llama import LLAMA

DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def weights():
    model = models.load("testbed:llama")
    return perturbed(model, 1)


@pytest.fixture
def outputs(completion):
    rng = np.random.default_rng(0)
    return [
        completion(rng.integers(4, 500, 9).tolist(), rng.integers(4, 500, 4).tolist()),
        completion(rng.integers(4, 500, 12).tolist(), rng.integers(4, 500, 3).tolist()),
    ]


def test_kinds():
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
def test_groups_are_what_an_update_forgets(name, layer, role):
    assert (by_layer(LLAMA, name), by_role(LLAMA, name)) == (layer, role)


def test_groups_come_in_the_order_of_the_forward(weights):
    """The head is tied: one tensor."""
    layers = [part.label for part in grouped(weights.rows, LLAMA, by_layer)]
    assert layers == ["embed_tokens", "layer 0", "layer 1", "norm"]
    assert [part.label for part in grouped(weights.rows, LLAMA, by_role)][:3] == [
        "embed_tokens",
        "q_proj",
        "k_proj",
    ]


def test_parts_are_each_named_once_and_the_widest_come_first(weights):
    parts = parts_of(weights.rows, LLAMA)
    assert parts[0] == Part(WHOLE, tuple(weights.rows))
    whole = [frozenset(part.tensors) for part in parts if part.rows is None]
    assert len(whole) == len(set(whole))
    labels = {part.label for part in parts}
    assert {"layer 1", "down_proj", "norms", "model.layers.1.mlp", DOWN} <= labels
    assert {part.label for part in parts if len(part.tensors) == 1} == set(weights.rows)
    half = weights.rows[DOWN] // 2
    assert Part(DOWN, (DOWN,), (half, 2 * half)) in parts
    assert not any(part.rows for part in parts if part.label == NORM), "nobody sends half a norm"


def test_what_did_not_arrive_is_old_and_the_rest_is_new_without_a_copy(weights):
    """Each was a third copy: 94 GiB for a model of 16."""
    before = [each.clone() for each in weights.new.parameters()]
    layer = next(part for part in parts_of(weights.rows, LLAMA) if part.label == "layer 0")
    mixed = weights.moved([Move(layer, -1.0)])
    old, new = weights.old.state_dict(), weights.new.state_dict()
    for name, tensor in mixed.state_dict().items():
        expected = old[name] if name in layer.tensors else new[name]
        assert torch.equal(tensor, expected), name
        assert tensor.data_ptr() == expected.data_ptr(), name
    assert all(torch.equal(a, b) for a, b in zip(before, weights.new.parameters(), strict=True))


def test_rows_and_shares_and_both_ends_of_a_tie(weights):
    mixed = weights.moved(
        [Move(Part(EMBEDDING, (EMBEDDING,), (100, 200)), -1.0), Move(Part(DOWN, (DOWN,)), 0.5)]
    ).state_dict()
    old, new = weights.old.state_dict(), weights.new.state_dict()
    torch.testing.assert_close(mixed[EMBEDDING][100:200], old[EMBEDDING][100:200])
    assert torch.equal(mixed[EMBEDDING][:100], new[EMBEDDING][:100])
    assert torch.equal(mixed["lm_head.weight"], mixed[EMBEDDING])
    torch.testing.assert_close(mixed[DOWN], new[DOWN] + 0.5 * (new[DOWN] - old[DOWN]))


def test_scores_are_those_of_the_outputs(weights, outputs):
    scores = weights.score(weights.old, outputs)
    expected = []
    for each in outputs:
        with torch.no_grad():
            rows = torch.log_softmax(weights.old(torch.tensor([each.sequence])).logits[0], -1)
        for place, token in enumerate(each.token_ids, start=len(each.prompt_token_ids)):
            expected.append(float(rows[place - 1, token]))
    assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "part", [Part(DOWN, (DOWN,), (3, 40)), Part(NORM, (NORM,)), Part(EMBEDDING, (EMBEDDING,), (0, 300))]
)
def test_slopes_are_what_a_little_more_of_an_update_does(outputs, part):
    model = models.load("testbed:llama").double()
    weights = perturbed(model, 1)
    slopes = weights.slopes(outputs)
    assert slopes[DOWN].shape == (7, weights.rows[DOWN])
    # Norms of transformers compute in fp32, whatever the model: a smaller step is lost in its rounding.
    much, little = (weights.score(weights.moved([Move(part, by)]), outputs) for by in (0.02, -0.02))
    assert part.column(slopes) == pytest.approx((much - little) / 0.04, rel=5e-3, abs=1e-4)
    assert np.abs(part.column(slopes)).max() > 1e-2


def test_slopes_leave_the_model_as_it_was(weights, outputs):
    wanted = [each.requires_grad for each in weights.new.parameters()]
    before = [each.clone() for each in weights.new.parameters()]
    weights.slopes(outputs)
    assert [each.requires_grad for each in weights.new.parameters()] == wanted
    assert all(each.grad is None for each in weights.new.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, weights.new.parameters(), strict=True))
