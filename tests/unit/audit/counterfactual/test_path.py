from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zerodrift import models
from zerodrift.audit.counterfactual.account import VANILLA, Account
from zerodrift.audit.counterfactual.path import (
    ROUNDINGS,
    jumped,
    path_forwards,
    path_hypotheses,
    path_variants,
    stretched,
)
from zerodrift.backends import variants
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.cause import CAUSES


@pytest.fixture(scope="module")
def mistral() -> Any:
    return models.load("testbed:mistral")


@pytest.fixture(scope="module")
def sequences() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(4, 500, 90).tolist()), tuple(rng.integers(4, 500, 20).tolist())]


def test_positions_jump_at_the_boundary_and_stretch_from_the_start() -> None:
    positions = torch.arange(4)
    assert jumped(2)(positions).tolist() == [0, 1, 3, 4]
    assert stretched(1.5)(positions).tolist() == [0, 1.5, 3, 4.5]


def test_variants_follow_from_the_model(mistral: Any) -> None:
    found = path_variants(mistral)
    assert {variant.cause for variant in found.values()} <= set(CAUSES)
    assert "rope-20000" in found
    assert "rope-10000" not in found, "the model's own base is no variant"
    assert {"no-window", "window-32", "window-63", "window-65", "window-128"} <= set(found)
    plain = path_variants(models.load("testbed:qwen2"))
    assert not any("window" in name for name in plain)
    assert "rope-10000" in plain


def test_a_model_without_rotary_positions_has_no_variant_of_them() -> None:
    found = path_variants(SimpleNamespace(config=SimpleNamespace()))
    assert not any(name.startswith("rope") for name in found)
    assert {"int8", "jump-64"} <= set(found)


def test_vanilla_is_the_model_itself(mistral: Any, sequences: list[tuple[int, ...]]) -> None:
    forward = path_forwards(mistral, {})[VANILLA]
    expected = list(Teacher(mistral, layout=Layout.PADDED).logits(sequences, [85, 10]))
    for ours, theirs in zip(forward(sequences, [85, 10]), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "same_short"),
    [
        ("bf16-head", False),
        ("int8", False),
        ("fp8-kv", False),
        ("rope-20000", False),
        ("stretch-1.05", False),
        # Beyond the reach of a short sequence these change nothing: that is how they are told from the others.
        ("no-window", True),
        ("window-65", True),
        ("jump-64", True),
    ],
)
def test_every_variant_computes_something_else_where_it_should(
    mistral: Any, sequences: list[tuple[int, ...]], name: str, same_short: bool
) -> None:
    forwards = path_forwards(mistral, {name: path_variants(mistral)[name]})
    for number, start in ((0, 85), (1, 10)):
        one = [sequences[number]]
        gap = (forwards[name](one, [start])[0] - forwards[VANILLA](one, [start])[0]).abs().mean()
        assert (float(gap) < 1e-5) is (number == 1 and same_short), (name, number, float(gap))


def test_a_forward_leaves_the_model_as_it_was(mistral: Any, sequences: list[tuple[int, ...]]) -> None:
    before = {name: tensor.clone() for name, tensor in mistral.state_dict().items()}
    found = path_variants(mistral)
    forwards = path_forwards(mistral, found)
    first = forwards[VANILLA](sequences, [85, 10])
    for name in ("int4", "bf16-body", "fp8-kv", "no-window"):
        forwards[name](sequences, [85, 10])
    assert all(torch.equal(tensor, before[name]) for name, tensor in mistral.state_dict().items())
    again = forwards[VANILLA](sequences, [85, 10])
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_fp8_keys_and_values_are_those_of_the_variant(mistral: Any, sequences: list[tuple[int, ...]]) -> None:
    """The forward must not set the attention back to the one without rounding."""
    changed = variants.with_fp8_kv(mistral)
    expected = changed(torch.tensor([sequences[1]])).logits[0, 9:-1]
    forwards = path_forwards(mistral, {"fp8-kv": path_variants(mistral)["fp8-kv"]})
    assert torch.allclose(forwards["fp8-kv"]([sequences[1]], [10])[0], expected, atol=1e-5)


def test_one_path_and_one_rounding_are_enough(mistral: Any) -> None:
    found = path_variants(mistral)
    hypotheses = list(path_hypotheses(Account(), found))
    assert len(hypotheses) == len(found) + len(ROUNDINGS)
    assert all(h.parameters == 1 for h in hypotheses)
    after_path = list(path_hypotheses(Account(forward="int8"), found))
    assert {h.account.rounding for h in after_path} == set(ROUNDINGS.values())
    after_rounding = list(path_hypotheses(Account(rounding="bfloat16"), found))
    assert {h.account.forward for h in after_rounding} == set(found)
    assert list(path_hypotheses(Account(forward="int8", rounding="bfloat16"), found)) == []
