"""Faults of one place inside the model that have no name: each is told with its place, and what was planted is what is found.

Planted are hooks and weights of this file, in values that stand nowhere else. What judges is the part of an audit that
looks inside the model, over tokens that the model itself sampled.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from zerodrift.audit.attribute import Attribution, Costs
from zerodrift.audit.counterfactual.evaluate import Evaluator
from zerodrift.audit.counterfactual.path import Paths
from zerodrift.audit.diagnose import by_parts
from zerodrift.backends import variants
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.faults.damage import Damage
from zerodrift.models.copies import sharing
from zerodrift.records.evidence import LocatedEvidence

NOTHING = Attribution((), 1e3, explained_to_floor=False)


def hooked(place: str, change: Any) -> Damage:
    """`change` is done to what a module gives; attention gives its hidden states first of several."""

    def behind(_: Any, __: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return lambda model: model.get_submodule(place).register_forward_hook(behind)


def before(place: str, change: Any) -> Damage:
    """`change` is done to what goes into a module."""
    return lambda model: model.get_submodule(place).register_forward_pre_hook(
        lambda _, given: (change(given[0]), *given[1:])
    )


def added(first: int, last: int, by: float) -> Any:
    def change(given: torch.Tensor) -> torch.Tensor:
        more = torch.zeros_like(given)
        more[..., first:last] = by
        return given + more

    return change


def times(first: int, last: int, factor: float) -> Any:
    def change(given: torch.Tensor) -> torch.Tensor:
        scales = torch.ones(given.shape[-1], dtype=given.dtype)
        scales[first:last] = factor
        return given * scales

    return change


def attended(layer: int, attend: Any) -> Damage:
    """Another attention in one layer."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        if module.layer_idx != layer:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        groups = query.shape[1] // key.shape[1]
        return attend(query, repeat_kv(key, groups), repeat_kv(value, groups), mask, options["scaling"])

    def damage(model: Any) -> None:
        name = f"another_attention_of_{layer}_{id(attend)}"
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)
        model.set_attn_implementation(name)
        model.set_attn_implementation = lambda _: None

    return damage


def scores(query: Any, key: Any, mask: Any, scaling: float, squeeze: Any = lambda scores: scores) -> Any:
    found = squeeze(query @ key.transpose(-1, -2) * scaling)
    causal = torch.ones(found.shape[-2:], dtype=torch.bool).tril()
    return found.masked_fill(~(causal if mask is None else mask), -torch.inf)


def sink(head: int, score: float) -> Any:
    def attend(query: Any, key: Any, value: Any, mask: Any, scaling: float) -> Any:
        found = scores(query, key, mask, scaling)
        one_more = torch.full_like(found[..., :1], -torch.inf)
        one_more[:, head] = score
        weights = torch.cat([found, one_more], dim=-1).softmax(dim=-1)[..., :-1]
        return (weights @ value).transpose(1, 2).contiguous(), None

    return attend


def squeezed(cap: float) -> Any:
    def attend(query: Any, key: Any, value: Any, mask: Any, scaling: float) -> Any:
        found = scores(query, key, mask, scaling, lambda each: cap * torch.tanh(each / cap))
        return (found.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None

    return attend


def later(head: int, by: int, base: float) -> Any:
    """Queries of one head as if they stood `by` positions further on."""

    def attend(query: Any, key: Any, value: Any, mask: Any, scaling: float) -> Any:
        half = query.shape[-1] // 2
        angle = by * base ** (-torch.arange(half, dtype=query.dtype) / half)
        one, other = query[:, head, :, :half], query[:, head, :, half:]
        query = query.clone()
        query[:, head] = torch.cat(
            [one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], dim=-1
        )
        return (scores(query, key, mask, scaling).softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None

    return attend


def long_waves(above: float, factor: float) -> Damage:
    def damage(model: Any) -> None:
        speeds = model.base_model.rotary_emb.inv_freq
        speeds[2 * torch.pi / speeds > above] *= factor

    return damage


def exchanged_rows(one: int, other: int) -> Damage:
    def damage(model: Any) -> None:
        weight = model.get_input_embeddings().weight.data.clone()
        weight[[one, other]] = weight[[other, one]]
        model.get_input_embeddings().weight = nn.Parameter(weight, requires_grad=False)

    return damage


def activation(layer: int, other: Any) -> Damage:
    def damage(model: Any) -> None:
        model.base_model.layers[layer].mlp.act_fn = other

    return damage


def gainless(place: str, by: float | None = None) -> Damage:
    def damage(model: Any) -> None:
        weight = model.get_submodule(place).weight
        weight.data = torch.ones_like(weight.data) if by is None else weight.data + by

    return damage


def rounded(dtype: torch.dtype) -> Any:
    return lambda given: given.to(dtype).to(given.dtype)


@cache
def sampled(model: str, script: Any) -> tuple[Any, ...]:
    """The plain model in fp32, and windows of what it sampled."""
    control = script("faults/never_located")
    reference = ReferenceBackend(f"testbed:{model}")
    plain = variants.in_dtype(reference.model, torch.float32)
    return plain, control.sampled(reference, 5), reference.facts.eos_token_ids, control.Teacher


@pytest.fixture
def found(script):
    def run(model: str, damage: Damage) -> Attribution:
        plain, windows, stops, teacher = sampled(model, script)
        changed = sharing(plain)
        damage(changed)
        own = changed.config._attn_implementation
        told = teacher(changed, attention=own).logprobs(
            [window.prompt + window.output for window in windows],
            [len(window.prompt) + window.before for window in windows],
        )
        cases = [
            window._replace(reported=each.double().numpy())
            for window, each in zip(windows, told, strict=True)
        ]
        paths = Paths(plain)
        evaluate = partial(Evaluator, forwards=paths.forwards, stop_ids=stops)
        return by_parts(NOTHING, Costs(evaluate(cases)), evaluate, paths, np.random.default_rng(3))

    return run


def place_of(attribution: Attribution) -> LocatedEvidence:
    assert attribution.response is not None
    assert len(attribution.response.located) == 1, attribution.response.message
    return attribution.response.located[0]


# Which model, what is planted, the place in words, the quantity and its value.
MLP, ATTENTION = "output of the MLP", "output of attention"
PLACES = {
    "limit": (
        "llama",
        before("model.layers.1.mlp.down_proj", lambda given: given.clamp(-0.21, 0.21)),
        ("layer 1, MLP activations", "limit", 0.21),
    ),
    "limit of a gate": (
        "qwen3",
        hooked("model.layers.2.mlp.gate_proj", lambda given: given.clamp(-0.7, 0.7)),
        ("layer 2, output of the gate", "limit", 0.7),
    ),
    "soft cap": (
        "qwen3",
        attended(1, squeezed(1.7)),
        ("layer 1, attention scores", "soft cap", 1.7),
    ),
    "bias of attention": (
        "qwen3",
        hooked("model.layers.1.self_attn", added(96, 128, 0.013)),
        (f"layer 1, {ATTENTION}, channels 96–127", "bias", 0.013),
    ),
    "bias of an odd run": (
        "llama",
        hooked("model.layers.0.mlp", added(37, 90, -0.008)),
        (f"layer 0, {MLP}, channels 37–89", "bias", -0.008),
    ),
    "bias of one channel": (
        "llama",
        hooked("model.layers.1.self_attn", added(201, 202, 0.06)),
        (f"layer 1, {ATTENTION}, channel 201", "bias", 0.06),
    ),
    "sink": ("llama", attended(0, sink(3, 0.8)), ("layer 0, attention head 3", "sink", np.exp(0.8))),
    "sink of little": (
        "qwen3",
        attended(2, sink(1, -0.5)),
        ("layer 2, attention head 1", "sink", np.exp(-0.5)),
    ),
    "negated values": (
        "qwen3",
        hooked("model.layers.2.self_attn.v_proj", times(64 + 37, 64 + 40, -1.0)),
        ("layer 2, values of KV head 1, channels 37–39", "scale", -1.0),
    ),
    "lost values": (
        "llama",
        hooked("model.layers.1.self_attn.v_proj", times(5, 19, 0.0)),
        ("layer 1, values of KV head 0, channels 5–18", "scale", 0.0),
    ),
    "head one further": (
        "llama",
        attended(1, later(2, 1, 1e4)),
        ("layer 1, queries of head 2", "offset", 1.0),
    ),
    "head one back": (
        "qwen3",
        attended(0, later(1, -1, 1e6)),
        ("layer 0, queries of head 1", "offset", -1.0),
    ),
}
OUTRIGHT = {
    "rows exchanged": ("llama", exchanged_rows(93, 307), "embeddings of tokens 93 and 307 exchanged"),
    "rows exchanged, no tie": (
        "qwen3",
        exchanged_rows(226, 339),
        "embeddings of tokens 226 and 339 exchanged",
    ),
    "activation": ("qwen2", activation(1, nn.GELU()), "layer 1, activation gelu instead of silu"),
    "activation of another": (
        "qwen3",
        activation(0, nn.GELU(approximate="tanh")),
        "layer 0, activation gelu_pytorch_tanh instead of silu",
    ),
    "gain lost": (
        "qwen3",
        gainless("model.layers.1.post_attention_layernorm"),
        "layer 1, post_attention_layernorm gain missing",
    ),
    "gain of one more": (
        "llama",
        gainless("model.layers.1.input_layernorm", 1.0),
        "layer 1, input_layernorm gain 1 + w instead of w",
    ),
}
NAMED = {
    "long waves": ("llama", long_waves(100.0, 1 / 3), "path/rope", "multiplied by 0.333"),
    "short waves": ("qwen3", long_waves(2000.0, 6.0), "path/rope", "multiplied by 6"),
    "stream in fp16": (
        "llama",
        before("model.layers.1", rounded(torch.float16)),
        "path/body-precision",
        "residual stream into layer 1 rounded to fp16",
    ),
    "norm in bf16": (
        "qwen3",
        hooked("model.layers.0.input_layernorm", rounded(torch.bfloat16)),
        "path/body-precision",
        "output of input_layernorm of layer 0 rounded to bf16",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_is_told_with_its_value(found, name):
    model, damage, (place, quantity, value) = PLACES[name]
    where = place_of(found(model, damage))
    assert (where.place, where.quantity) == (place, quantity)
    assert where.estimate == pytest.approx(value, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("name", OUTRIGHT)
def test_what_was_changed_outright_is_told(found, name):
    model, damage, message = OUTRIGHT[name]
    where = place_of(found(model, damage))
    # Two of a kind may be one: the input of a norm whose gain is all ones has the same place and another word.
    assert f"{where.place} {where.quantity}" == message.replace(", activation ", ", activation ")


@pytest.mark.parametrize("name", NAMED)
def test_what_has_a_name_has_it_with_its_place(found, name):
    model, damage, cause, message = NAMED[name]
    attribution = found(model, damage)
    (selected,) = attribution.selected
    assert selected.cause == cause
    assert message in selected.message
