"""Exchanges of weights, against tensors exchanged by hand; the model they are made of is never written to."""

from typing import Any

import pytest
import torch
from tests.tiny_models import tiny

from zerodrift import models
from zerodrift.audit.counterfactual.exchanged import MOST_EXCHANGES, _nearest_first, exchanges
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.core.cause import CAUSES

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def qwen3():
    return models.load("testbed:qwen3")


def find(model: Any, message: str) -> Variant:
    (variant,) = [each for each in exchanges(model) if each.message == message]
    return variant


def state(model: Any) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(one: State, other: State) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


def test_one_projection_of_two_layers(qwen3):
    before = state(qwen3)
    built = state(find(qwen3, "v_proj of layers 0 and 2 exchanged").build(qwen3))
    names = ["model.layers.0.self_attn.v_proj.weight", "model.layers.2.self_attn.v_proj.weight"]
    assert differing(built, before) == set(names)
    assert torch.equal(built[names[0]], before[names[1]])
    assert torch.equal(built[names[1]], before[names[0]])
    assert not differing(before, state(qwen3))


def test_embedding_and_head(qwen3):
    before = state(qwen3)
    built = state(find(qwen3, "embedding and head exchanged").build(qwen3))
    assert torch.equal(built["lm_head.weight"], before["model.embed_tokens.weight"])
    assert torch.equal(built["model.embed_tokens.weight"], before["lm_head.weight"])
    assert not any("head" in each.message for each in exchanges(models.load("testbed:llama")))


def test_a_square_tensor_transposed(qwen3):
    before = state(qwen3)
    built = state(find(qwen3, "o_proj of layer 1 transposed").build(qwen3))
    name = "model.layers.1.self_attn.o_proj.weight"
    assert differing(built, before) == {name}
    assert torch.equal(built[name], before[name].T)
    # Two key heads of 64 in a width of 256: no square, no transpose.
    assert not any("k_proj" in each.message and "transposed" in each.message for each in exchanges(qwen3))


def test_parts_of_a_fused_tensor():
    model = tiny("gpt2")
    before = state(model)
    name = model.transformer.h[0].attn.c_attn.weight
    built = find(model, "the part for k and the part for v of layer 0 exchanged").build(model)
    q, k, v = name.detach().chunk(3, dim=-1)
    assert torch.equal(built.transformer.h[0].attn.c_attn.weight, torch.cat([q, v, k], dim=-1))
    assert not differing(before, state(model))


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text", "qwen3_moe", "mamba"])
def test_messages_are_distinct_and_every_exchange_changes_something(model_type):
    model = tiny(model_type)
    before = state(model)
    found = list(exchanges(model))
    assert len({each.message for each in found}) == len(found) <= MOST_EXCHANGES
    for each in found:
        assert each.cause in CAUSES
        assert differing(before, state(each.build(model))), each.message
    assert not differing(before, state(model))


def test_neighbours_come_first_and_all_pairs_come():
    pairs = _nearest_first(30)
    assert len(pairs) == 435
    assert pairs[:29] == [(layer, layer + 1) for layer in range(29)]
    assert pairs[29] == (0, 29)
