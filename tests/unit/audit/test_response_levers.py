"""Levers of real modules: their derivatives are those of finite differences, and nothing stays behind."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift.audit.counterfactual.evaluate import CaseWindow
from zerodrift.audit.response.derivatives import LinearResponse
from zerodrift.audit.response.knobs import by_knob, knobs_of
from zerodrift.audit.response.levers import Effect, Lever
from zerodrift.audit.response.locate import TOO_FAR, respond
from zerodrift.backends import variants
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.request import Prompt, Request, SamplingParams

SAMPLING = SamplingParams(temperature=0.8, max_tokens=4)
# Storing in fp8 goes all the way at 1 and moves little: at 3e-3 Gemma 3's keys moved 8.7e-5, and its norms, which are in fp32
# whatever the model is, round by 1e-6.
STEPS = {
    Effect.NORM_EPS: 1e-5,
    Effect.SOFT_CAP: 1e-5,
    Effect.KEYS_FP8: 0.05,
    Effect.VALUES_FP8: 0.05,
    Effect.SCORE_CAP: 1e-4,
}
STEP = 3e-3
MODELS = ("llama", "qwen3", "gemma3", "qwen3-moe")


@cache
def prepared(name: str) -> tuple[Any, list[CaseWindow]]:
    reference = ReferenceBackend(f"testbed:{name}")
    rng = np.random.default_rng(2)
    prompts = [tuple(rng.integers(4, 500, 9 + number).tolist()) for number in range(4)]
    answers = reference.generate([Request(Prompt(ids), SAMPLING) for ids in prompts])
    windows = []
    for ids, answer in zip(prompts, answers, strict=True):
        told = answer.completions[0]
        numbers = np.array(told.logprobs)[-2:]
        before = len(told.token_ids) - len(numbers)
        windows.append(
            CaseWindow(ids, told.token_ids, SAMPLING, numbers, np.full(len(numbers), 4e-6), before=before)
        )
    return variants.in_dtype(reference.model, torch.float32), windows


@pytest.fixture
def response():
    return lambda name: LinearResponse(*prepared(name), (0,))


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_are_those_of_finite_differences(response, name):
    it = response(name)
    # Derivative and difference in one precision: a value on the edge between two numbers of fp8 falls to another
    # side in fp32 than in fp64, which is 5 % of a derivative on one processor and nothing on the next.
    wide = LinearResponse(variants.in_dtype(it.plumbing.model, torch.float64), it.windows, (0,))
    last = {lever.kind: lever for lever in it.levers}
    # What one more entry of weight 1 does stands there, which is no derivative at 0.
    del last[Effect.SINK]
    for kind, lever in last.items():
        # The part that moves most: an expert that no token was sent to moves nothing.
        member = max(
            (each for each in it.jacobian.columns if each[0] == lever),
            key=lambda each: np.abs(it.jacobian.matrix_NC[:, it.jacobian.columns[each]]).max(),
        )
        step = STEPS.get(kind, STEP)
        low = 0.0 if kind in (Effect.SOFT_CAP, Effect.SCORE_CAP) else -step
        moved = wide.logprobs({member: step}) - wide.logprobs({member: low})
        slope = wide.jacobian.matrix_NC[:, wide.jacobian.columns[member]]
        error, size = np.abs(slope * (step - low) - moved), np.abs(moved)
        if name == "qwen3-moe":
            # A token that goes to another expert jumps, by 0.86 nats once, and has no derivative: one of the eight may.
            jumps = (error > 0.5 * size) & (size > 0.1 * size.max())
            assert jumps.sum() <= 1, kind
            error, size = error[~jumps], size[~jumps]
        assert error.max() < 0.01 * size.max(), kind
        if kind not in {Effect.KEYS_FP8, Effect.VALUES_FP8}:
            narrow = it.jacobian.matrix_NC[:, it.jacobian.columns[member]]
            assert np.abs(narrow - slope).max() < 0.001 * np.abs(slope).max(), kind


@pytest.mark.parametrize("name", MODELS)
def test_every_part_of_a_family_has_levers(response, name):
    it = response(name)
    config = it.plumbing.model.config
    layers = config.num_hidden_layers
    counts = Counter(lever.kind for lever in it.levers)
    assert counts[Effect.SCORES] == counts[Effect.HEAD] == counts[Effect.KEYS_FP8] == layers
    assert counts[Effect.EXPERT if name == "qwen3-moe" else Effect.NEURON] == layers
    norms = {"llama": 2, "qwen3": 4, "gemma3": 6, "qwen3-moe": 4}[name]
    assert counts[Effect.NORM_EPS] == counts[Effect.NORM_GAIN] == layers * norms + 1
    assert counts[Effect.ROTARY] == (2 if name == "gemma3" else 1)
    dense = name != "qwen3-moe"
    assert counts[Effect.SLOPE] == counts[Effect.GATE] == (layers if dense else 0)
    assert counts[Effect.RESIDUAL] == counts[Effect.SINK] == counts[Effect.SCORE_CAP] == layers
    assert counts[Effect.ATTENTION_BIAS] == counts[Effect.MLP_BIAS] == counts[Effect.VALUE_CHANNEL] == layers
    assert counts[Effect.EMBEDDED_BIAS] == 1
    # Two tables, and attention does not say which of them is its own.
    assert counts[Effect.HEAD_POSITION] == (0 if name == "gemma3" else layers)
    # Experts take tokens of many sequences at once: their activation has no number for each.
    assert it.plumbing.missing == ([] if dense else ["activations"])


def test_what_a_family_does_not_have_is_skipped_and_said():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64)).eval()
    windows = [CaseWindow((1, 2, 3), (4, 5), SamplingParams(), np.zeros(2), np.ones(2))]
    it = LinearResponse(model, windows, ())
    assert it.plumbing.missing == ["rotary frequencies"]
    kinds = {lever.kind for lever in it.levers}
    assert {
        Effect.SCORES,
        Effect.HEAD,
        Effect.NEURON,
        Effect.NORM_EPS,
        Effect.SLOPE,
        Effect.RESIDUAL,
    } <= kinds
    assert not kinds & {Effect.ROTARY, Effect.OFFSET, Effect.EXPERT, Effect.GATE}
    assert np.abs(it.jacobian.matrix_NC).max() > 0


def test_the_model_is_left_as_it_was(response):
    it = response("qwen3")
    model = it.plumbing.model
    attention, before = model.config._attn_implementation, it.logprobs({})
    assert np.abs(it.logprobs({(it.levers[0], 0): 0.5}) - before).max() > 1e-3
    assert len(it.jacobian.columns) > 1000
    assert model.config._attn_implementation == attention
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    np.testing.assert_array_equal(it.logprobs({}), before)


def test_a_knob_of_many_levers_is_their_sum(response):
    it = response("llama")
    knobs = knobs_of(it.levers)
    everywhere = next(
        knob for knob in knobs if knob.part == "attention in all layers" and knob.kind is Effect.SCORES
    )
    single = [knob for knob in knobs if knob.kind is Effect.SCORES and knob.number is not None]
    assert len(everywhere.members) == len(single) == 8
    whole, *parts = by_knob([everywhere, *single], it.jacobian).T
    np.testing.assert_allclose(whole, np.sum(parts, axis=0), rtol=1e-3, atol=1e-4)


def test_names_are_distinct():
    levers = [Lever(Effect.NORM_EPS, layer, place, 1, 1e-6) for layer in range(2) for place in ("a", "b")]
    levers += [Lever(Effect.HEAD, layer, "", 3) for layer in range(2)]
    told = [(knob.place, knob.quantity) for knob in knobs_of(levers)]
    assert len(set(told)) == len(told)
    assert ("layer 1, attention head 2", "output") in told
    assert ("a in all layers", "eps") in told


def test_nothing_is_said_of_what_is_no_small_change():
    model, windows = prepared("llama")
    far = [window._replace(reported=window.reported - 2 * TOO_FAR) for window in windows]
    assert respond(model, far, (0,), np.random.default_rng(0)) is None
