import numpy as np
import pytest
import torch
from tests.tiny_models import tiny

from zerodrift import models
from zerodrift.audit.counterfactual.explanation import VANILLA, Explanation
from zerodrift.audit.counterfactual.path import (
    ROUNDINGS,
    Paths,
    path_hypotheses,
    path_variants,
    vanilla_forward,
)
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.backends import variants
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.cause import CAUSES


@pytest.fixture(scope="module")
def mistral():
    return models.load("testbed:mistral")


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(4, 500, 90).tolist()), tuple(rng.integers(4, 500, 20).tolist())]


def test_variants_follow_from_the_model(mistral):
    found = path_variants(mistral)
    assert {variant.cause for variant in found.values()} <= set(CAUSES)
    assert {"no-window", "window-32", "window-63", "window-65", "window-128"} <= set(found)
    plain = path_variants(models.load("testbed:qwen2"))
    assert not any("window" in name for name in plain)
    assert {"int4-16", "int4-32", "int4-64", "int4-128"} <= set(plain)


def test_groups_that_do_not_fit_the_model_are_not_tried():
    odd = tiny("gpt_neox", hidden_size=96)
    assert {name for name in path_variants(odd) if name.startswith("int4")} == {"int4-16", "int4-32"}


def test_vanilla_is_the_model_itself(mistral, sequences):
    forward = vanilla_forward(mistral)
    expected = list(Teacher(mistral, layout=Layout.PADDED).logits(sequences, [85, 10]))
    for ours, theirs in zip(forward(sequences, [85, 10], [85, 10]), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "same_short"),
    [
        ("bf16-head", False),
        ("int8", False),
        ("fp8-kv", False),
        ("int4-64", False),
        # Beyond the reach of a short sequence these change nothing: that is how they are told from the others.
        ("no-window", True),
        ("window-65", True),
    ],
)
def test_every_variant_computes_something_else_where_it_should(mistral, sequences, name, same_short):
    forwards = Paths(mistral).forwards
    for number, start in ((0, 85), (1, 10)):
        one = [sequences[number]]
        gap = (
            (forwards[name](one, [start], [start])[0] - forwards[VANILLA](one, [start], [start])[0])
            .abs()
            .mean()
        )
        assert (float(gap) < 1e-5) is (number == 1 and same_short), (name, number, float(gap))


def test_a_forward_leaves_the_model_as_it_was(mistral, sequences):
    before = {name: tensor.clone() for name, tensor in mistral.state_dict().items()}
    forwards = Paths(mistral).forwards
    first = forwards[VANILLA](sequences, [85, 10], [85, 10])
    for name in ("int4-32", "bf16-body", "fp8-kv", "no-window"):
        forwards[name](sequences, [85, 10], [85, 10])
    assert all(torch.equal(tensor, before[name]) for name, tensor in mistral.state_dict().items())
    again = forwards[VANILLA](sequences, [85, 10], [85, 10])
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_fp8_keys_and_values_are_those_of_the_variant(mistral, sequences):
    """The forward must not set the attention back to the one without rounding."""
    changed = variants.with_fp8_kv(mistral)
    expected = changed(torch.tensor([sequences[1]])).logits[0, 9:-1]
    forwards = Paths(mistral).forwards
    assert torch.allclose(forwards["fp8-kv"]([sequences[1]], [10], [10])[0], expected, atol=1e-5)


def test_one_path_and_one_rounding_are_enough(mistral):
    found = path_variants(mistral)
    hypotheses = list(path_hypotheses(Explanation(), found))
    assert len(hypotheses) == len(found) + len(ROUNDINGS)
    assert all(h.parameters == 1 for h in hypotheses)
    after_path = list(path_hypotheses(Explanation(forward="int8"), found))
    assert {h.explanation.rounding for h in after_path} == set(ROUNDINGS.values())
    after_rounding = list(path_hypotheses(Explanation(rounding="bfloat16"), found))
    assert {h.explanation.forward for h in after_rounding} == set(found)
    assert list(path_hypotheses(Explanation(forward="int8", rounding="bfloat16"), found)) == []


def test_a_fitted_forward_is_added_once_and_found_by_its_name(mistral, sequences):
    paths = Paths(mistral)
    forwards = paths.forwards
    late = Variant("path/context-boundary", "late", lambda m: m, positions=lambda positions: positions + 7)
    double = Variant("path/rope", "double", lambda m: m, positions=lambda positions: positions * 2)
    assert paths.add("late", late) == paths.add("late", double) == "late"
    moved, vanilla = (forwards[name](sequences[1:], [10], [10])[0] for name in ("late", VANILLA))
    assert torch.allclose(moved, vanilla, atol=1e-3), "only distances count"
    assert not torch.allclose(
        forwards[paths.add("double", double)](sequences[1:], [10], [10])[0], vanilla, atol=1e-3
    )
    assert "late" not in paths.grid
