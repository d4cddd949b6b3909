"""Gemma 3 and Qwen3-MoE: each theorem is seen failing with one plain op, gradients are vanilla's, routing is recorded.

The theorems themselves run over these families with all others (`test_exact_forward.py`).
"""

import copy

import pytest
import torch
from tests.parity.test_exact_forward import (
    build,
    model_of,
    tokens,
)

from zerodrift import exact, models
from zerodrift.core.errors import UnsupportedModel
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.exact import experts
from zerodrift.exact.verification import Schedule, alone, differing_rows, packed, padded, paged

GEMMA = ("gemma3", "gemma3-wide")
MOE = ("qwen3-moe", "qwen3-moe-wide")
DENSE_OPS, MOE_OPS = ("linear", "attention", "activation"), ("router", "experts")


@pytest.mark.parametrize(
    ("name", "op"),
    [(name, op) for name in GEMMA for op in DENSE_OPS]
    + [(name, op) for name in MOE for op in (*DENSE_OPS, *MOE_OPS)],
)
def test_a_plain_op_is_seen(name: str, op: str) -> None:
    sequences = tokens(1, [1, 150, 33, 65])
    found = {}
    for plain in (frozenset({op}), frozenset()):
        model = model_of(name, plain)
        with torch.no_grad():
            whole = alone(model, sequences)
            found[plain] = differing_rows(whole, paged(model, sequences, Schedule(1, 16)))
    assert found[frozenset({op})] > 0
    assert found[frozenset()] == 0


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_token_goes_to_the_same_experts_by_every_path(name: str, seed: int) -> None:
    model, sequences = model_of(name), tokens(seed, [70, 9, 33])
    total = sum(map(len, sequences))
    with torch.no_grad():
        with exact.recorded_routing(model) as one_by_one:
            alone(model, sequences)
        with exact.recorded_routing(model) as together:
            packed(model, sequences)
        with exact.recorded_routing(model) as decoded:
            paged(model, sequences[:1], Schedule(seed, 16, chunks=(1,), share=1.0))
    sparse = {"qwen3-moe": (0, 2), "qwen3-moe-wide": (0,)}[name]
    assert one_by_one.layers == sparse
    for layer in sparse:
        assert one_by_one.experts(layer).shape == (total, model.config.num_experts_per_tok)
        assert torch.equal(one_by_one.experts(layer), together.experts(layer))
        assert torch.equal(one_by_one.weights(layer), together.weights(layer))
        assert torch.equal(one_by_one.experts(layer)[:70], decoded.experts(layer))
        assert torch.equal(one_by_one.weights(layer)[:70], decoded.weights(layer))
    # Outside nothing is kept.
    alone(model, sequences[1:2])
    assert len(one_by_one.experts(0)) == total


def test_only_a_prepared_model_with_experts_records() -> None:
    for model in (build("qwen3-moe"), model_of("gemma3")):
        with pytest.raises(UnsupportedModel, match="experts"), exact.recorded_routing(model):
            pass


def test_equal_probabilities_go_to_the_lower_number() -> None:
    logits = torch.zeros(3, 40)
    logits[1, 7] = logits[1, 30] = 1.0
    logits[2, 39] = 2.0
    weights, chosen = experts.routed(logits, 3, normalise=True)
    assert chosen.tolist() == [[0, 1, 2], [7, 30, 0], [39, 0, 1]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    raw, _ = experts.routed(logits, 3, normalise=False)
    torch.testing.assert_close(raw[0], torch.full((3,), 1 / 40))


def test_an_expert_that_nobody_needs_has_a_gradient_of_zero() -> None:
    model = copy.deepcopy(model_of("qwen3-moe"))
    with exact.recorded_routing(model) as routing:
        packed(model, [[5]])[0].sum().backward()
    used = set(routing.experts(0).flatten().tolist())
    gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad
    assert [bool(part.any()) for part in gradient] == [number in used for number in range(9)]


def test_the_forward_follows_weights_of_experts() -> None:
    model, sequences = copy.deepcopy(model_of("qwen3-moe")), tokens(4, [33])
    with torch.no_grad():
        before = alone(model, sequences)
        # Through .data, which torch does not count.
        model.model.layers[0].mlp.experts.down_proj.data.mul_(2)
        moved = alone(model, sequences)
        assert differing_rows(before, moved) == 33
        assert differing_rows(moved, paged(model, sequences, Schedule(0, 16))) == 0
        model.model.layers[0].mlp.experts.down_proj.data.div_(2)
        model.model.layers[0].mlp.gate.weight.data.mul_(-1)
        assert differing_rows(before, alone(model, sequences)) == 33


@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe"])
def test_the_engine_reports_the_trainers_logprobs_before_and_after_a_swap(name: str) -> None:
    old, trainer = models.load(f"testbed:{name}"), exact.prepare(models.load(f"testbed:{name}"))
    new = {key: tensor * 1.01 for key, tensor in old.state_dict().items()}
    engine, params = Engine(f"testbed:{name}"), SamplingParams(max_tokens=12, seed=3, temperature=0.8)
    for label, state in (("old", None), ("new", new), ("old again", old.state_dict())):
        if state is not None:
            engine.swap_weights(state, label)
            trainer.load_state_dict(state)
        outputs = engine.generate([[5, 6, 7], [9] * 40, [1]], params)
        found = exact.token_logprobs(trainer, outputs)
        assert [tuple(each.tolist()) for each in found] == [each.logprobs for each in outputs], label


@pytest.mark.parametrize("names", [GEMMA, MOE], ids=["gemma3", "qwen3-moe"])
def test_rows_that_differ(names: tuple[str, ...]) -> None:
    """Counted: 10,000 rows of each family with `-m long`, a tenth of it otherwise."""
    _count(names, rows=1_000)


@pytest.mark.long
@pytest.mark.parametrize("names", [GEMMA, MOE], ids=["gemma3", "qwen3-moe"])
def test_ten_thousand_rows_that_differ(names: tuple[str, ...]) -> None:
    """The number that is claimed: at least 10,000 rows by four paths, none of which differs."""
    _count(names, rows=10_000)


def _count(names: tuple[str, ...], rows: int) -> None:
    counted = differing = 0
    seed = 0
    while counted < rows:
        for name in names:
            model, sequences = model_of(name), tokens(seed, [1, 65, 129, 17, 40])
            with torch.no_grad():
                whole = alone(model, sequences)
                paths = [
                    packed(model, sequences),
                    padded(model, sequences, left=seed % 2 == 0),
                    paged(model, sequences, Schedule(seed, (5, 16, 64)[seed % 3])),
                ]
            counted += sum(map(len, sequences)) * len(paths)
            differing += sum(differing_rows(whole, path) for path in paths)
        seed += 1
    print(f"{names[0]}: {counted} rows, {differing} differ")  # noqa: T201  the figure is what this is for
    assert differing == 0
