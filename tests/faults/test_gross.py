"""Gross faults inside the model, far beyond any derivative: exchanged, missing and doubled parts, and factors of any size.

What is planted here are hooks and weights of this file. Layers are counted from 0.
"""

from typing import Any

import pytest
import torch
from torch import nn

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.validation import ValidationConfig
from zerodrift.faults.damage import Damage, Damaged
from zerodrift.records.verdict import Outcome

SMALL = ValidationConfig(num_prompts=16, equivalence_trials=24, max_tokens=16)


@pytest.fixture
def principal(matrix, reference, tmp_path):
    def run(damage, model):
        engine = Damaged(ReferenceBackend(model, dtype="float32"), damage)
        record = matrix.judge(engine, reference(model), tmp_path, SMALL)
        assert record.verdict is Outcome.FAIL
        return next(cause for cause in record.causes if cause.gating)

    return run


def exchanged(one: str, other: str) -> Damage:
    def damage(model: Any) -> None:
        first, second = model.get_parameter(one), model.get_parameter(other)
        first.data, second.data = second.data, first.data

    return damage


@pytest.mark.parametrize(
    ("model", "one", "other"),
    [
        ("testbed:llama", "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        (
            "testbed:qwen3",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.2.self_attn.k_proj.weight",
        ),
        (
            "testbed:mistral",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.v_proj.weight",
        ),
        ("testbed:qwen2", "lm_head.weight", "model.embed_tokens.weight"),
    ],
)
def test_weights_in_each_others_place_are_named(principal, model, one, other):
    cause = principal(exchanged(one, other), model)
    assert cause.cause == "weights/swapped", cause.evidence
    assert cause.explained > 0.99


def louder(factor: float) -> Damage:
    def damage(model: Any) -> None:
        model.get_input_embeddings().register_forward_hook(lambda _, __, hidden: hidden * factor)

    return damage


def scores(factor: float) -> Damage:
    def damage(model: Any) -> None:
        for layer in model.base_model.layers:
            layer.self_attn.scaling *= factor

    return damage


@pytest.mark.parametrize(
    ("model", "damage", "part", "factor"),
    [
        ("testbed:qwen3", louder(11.3), "embeddings", 11.3),
        ("testbed:llama", louder(0.21), "embeddings", 0.21),
        # The root of the width, forgotten.
        ("testbed:gemma3", louder(1 / 16), "embeddings", 1 / 16),
        ("testbed:qwen2", scores(8.0), "attention scores of 2 layers", 8.0),
    ],
)
def test_a_factor_of_any_size_is_found(principal, model, damage, part, factor):
    cause = principal(damage, model)
    assert cause.cause == "unexplained", cause.evidence
    (found,) = cause.located
    assert (found.part, found.quantity) == (part, "scale")
    assert found.estimate == pytest.approx(factor, rel=1e-3)


def transposed(model: Any) -> None:
    weight = model.base_model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.T.contiguous()


def without_head_norms(model: Any) -> None:
    for layer in model.base_model.layers:
        layer.self_attn.q_norm = nn.Identity()


def without_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()


def with_gelu(model: Any) -> None:
    for layer in model.base_model.layers:
        layer.mlp.act_fn = nn.GELU()


class NoResidual(nn.Module):
    """Takes away what the layer adds to it afterwards."""

    def __init__(self, mlp: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.mlp, self.norm = mlp, norm
        self.entered = torch.zeros(())
        norm.register_forward_pre_hook(lambda _, given: setattr(self, "entered", given[0]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden) - self.entered


def without_residual(model: Any) -> None:
    layer = model.base_model.layers[1]
    layer.mlp = NoResidual(layer.mlp, layer.post_attention_layernorm)


def without_attention(model: Any) -> None:
    model.base_model.layers[0].self_attn.o_proj.weight.data.zero_()


def negated_mlp(model: Any) -> None:
    model.base_model.layers[2].mlp.down_proj.weight.data.neg_()


def attention_twice(model: Any) -> None:
    model.base_model.layers[1].self_attn.register_forward_hook(
        lambda _, __, output: (2 * output[0], *output[1:])
    )


def exchanged_heads(role: str, *heads: int) -> Damage:
    def damage(model: Any) -> None:
        for projection in role.split(","):
            weight = getattr(model.base_model.layers[0].self_attn, f"{projection}_proj").weight.data
            by_head = weight.unflatten(0, (-1, model.config.head_dim))
            by_head[list(heads)] = by_head[list(reversed(heads))].clone()

    return damage


@pytest.mark.parametrize(
    ("model", "damage", "layer", "part", "quantity"),
    [
        ("testbed:qwen3", negated_mlp, 2, "MLP", "negated"),
        ("testbed:llama", attention_twice, 1, "attention", "there twice"),
        ("testbed:llama", exchanged_heads("k,v", 0, 1), 0, "keys and values of heads 0 and 1", "exchanged"),
        ("testbed:qwen3", exchanged_heads("q", 1, 3), 0, "queries of heads 1 and 3", "exchanged"),
        ("testbed:llama", transposed, 1, "o_proj", "transposed"),
        ("testbed:qwen3", without_head_norms, None, "self_attn.q_norm in all layers", "missing"),
        ("testbed:qwen2", without_biases, None, "biases of projections in all layers", "missing"),
        ("testbed:qwen2", with_gelu, None, "activation in all layers", "gelu instead of silu"),
        ("testbed:mistral", without_residual, 1, "residual around the MLP", "missing"),
        ("testbed:llama", without_attention, 0, "attention", "missing"),
    ],
)
def test_a_model_put_together_wrongly_is_located(principal, model, damage, layer, part, quantity):
    cause = principal(damage, model)
    assert cause.cause == "unexplained", cause.evidence
    (found,) = cause.located
    assert (found.layer, found.part, found.quantity) == (layer, part, quantity)
    assert found.done
    assert found.r2 > 0.99


@pytest.mark.parametrize("size", [0.15, 0.4])
def test_weights_that_differ_everywhere_are_none_of_it(principal, size):
    def damage(model):
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += size * parameter.data.std() * noise

    cause = principal(damage, "testbed:qwen3")
    assert cause.cause in ("unexplained", "weights/other-model"), cause.evidence
    assert not cause.located
