"""Values of positions are found wherever they are, with few looks: on predictions played by numpy, which turn as a
rotary embedding does."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from zerodrift.audit.counterfactual.explanation import VANILLA, Explanation, Hypothesis
from zerodrift.audit.counterfactual.position import (
    FirstOff,
    FitCost,
    first_off,
    jumped,
    position_hypotheses,
    stretched,
)

Floats = NDArray[np.float64]
OWN = 10_000.0
SIGMA = 3e-6
RNG = np.random.default_rng(0)
DISTANCES = RNG.integers(1, 40, (16, 24))
"""From each of 16 rows to 24 keys."""
WEIGHTS = RNG.normal(0, 0.1, (16, 24, 8))
PLACES = np.arange(150, 166)
"""Rows of which a jump turns the keys before it."""


def turned(distances: Floats, base: float) -> Floats:
    """What each row predicts where its keys are seen from so far, with a base."""
    frequencies = base ** (-np.arange(8) / 8)
    angles = distances[:, :, None] * frequencies
    return (WEIGHTS * np.cos(angles)).sum(axis=(1, 2))


def predicted(account: Explanation) -> Floats:
    """The forward's name says what was in force."""
    if match := re.match(r"rotary base (\S+) instead", account.forward):
        return turned(DISTANCES, float(match[1]))
    if match := re.match(r"positions multiplied by (\S+)", account.forward):
        return turned(DISTANCES * float(match[1]), OWN)
    if match := re.match(r"positions from (\d+) on", account.forward):
        keys = PLACES[:, None] - 4 * DISTANCES
        crossed = (keys < int(match[1])) & (PLACES[:, None] >= int(match[1]))
        return turned(DISTANCES + crossed, OWN)
    assert account.forward == VANILLA
    return turned(DISTANCES, OWN)


class Angles(SimpleNamespace):
    """A model whose attention cannot be replaced: only angles are asked."""

    def set_attn_implementation(self, name: str) -> None:
        raise ValueError(name)


class Asked:
    """FitCost that see an engine with `truth` in force, and count the forwards they are asked for."""

    def __init__(self, truth: str) -> None:
        self.truth = Explanation(forward=truth)
        self.forwards: set[str] = set()

    def residual(self, account: Explanation) -> Floats:
        self.forwards.add(account.forward)
        return predicted(self.truth) - predicted(account)

    def cost(self, account: Explanation) -> float:
        return float(np.log1p((self.residual(account) / SIGMA) ** 2).sum())

    def at_floor(self, account: Explanation) -> bool:
        return bool(np.abs(self.residual(account)).max() < 4 * SIGMA)

    def hypotheses(self, begins: FirstOff | None = None, rope: bool = True) -> list[Hypothesis]:
        turning = {"rope_parameters": {"rope_theta": OWN}} if rope else {}
        model = Angles(config=SimpleNamespace(**turning, _attn_implementation="its own"))
        paths: Any = SimpleNamespace(model=model, add=lambda name, _: name)
        scouts = FitCost(self.cost, self.residual, self.at_floor)
        return list(position_hypotheses(Explanation(), paths, scouts, begins))


@pytest.mark.parametrize(
    "truth",
    [
        *(
            f"rotary base {base} instead of 10000"
            for base in (30000, 20000, 500000, 1000, 3700, 12345.678, 10500)
        ),
        *(
            f"positions multiplied by {factor}"
            for factor in (1.07, 1.05, 0.93, 1.16, 0.84, 0.5, 2, 1.0123, 1.003)
        ),
    ],
)
def test_a_value_is_found_between_the_looks(truth):
    scouts = Asked(truth)
    best = min(scouts.hypotheses(), key=lambda each: scouts.cost(each.explanation))
    assert scouts.at_floor(best.explanation)
    assert (best.cause, best.parameters) == ("path/rope", 1)
    said, meant = (float(re.findall(r"[\d.]+", words)[0]) for words in (best.message, truth))
    assert said == pytest.approx(meant, rel=1e-5)
    assert len(scouts.forwards) <= 50, "fifty forwards over two windows are half a scoring pass"


@pytest.mark.parametrize("value", ["30000", "3700"])
def test_a_round_value_is_preferred(value):
    best, *_ = Asked(f"rotary base {value} instead of 10000").hypotheses()
    assert best.message == f"rotary base {value} instead of 10000"


@pytest.mark.parametrize("place", [16, 48, 64, 100, 37, 131])
@pytest.mark.parametrize("crossed", [True, False], ids=["seen", "in the prompts"])
def test_a_jump_is_found_wherever_it_is(place, crossed):
    """Where outputs reach across it the first row that is off is its place; in a prompt it is looked for."""
    scouts = Asked(f"positions from {place} on are one too high")
    best, *_ = scouts.hypotheses(FirstOff(place - 1, place) if crossed else FirstOff(0, 150))
    assert best.message == f"positions from {place} on are one too high"
    assert best.cause == "path/context-boundary"
    assert len(scouts.forwards) <= (8 if crossed else 60)


def test_what_explains_the_scouts_ends_the_search():
    scouts = Asked("positions multiplied by 1.07")
    assert len(scouts.hypotheses(FirstOff(0, 150))) == 1


def test_nothing_is_refined_where_no_look_helps():
    """Numbers that no position moves: looks are all it costs, and no cause comes of them."""

    class Unmoved(Asked):
        def residual(self, account):
            self.forwards.add(account.forward)
            return np.ones(16)

    scouts = Unmoved(VANILLA)
    assert scouts.hypotheses() == []
    assert len(scouts.forwards) <= 36


def test_a_healthy_engine_costs_nothing():
    healthy = Asked(VANILLA)
    assert healthy.hypotheses(FirstOff(3, 7)) == []
    assert healthy.forwards == {VANILLA}


def test_noise_gets_no_exact_account():
    """The size of bf16 rounding: whatever is fitted to it leaves it where it was."""
    noise = np.random.default_rng(1).normal(0, 3e-3, 16)

    class Noisy(Asked):
        def residual(self, account):
            return super().residual(account) + noise

    scouts = Noisy(VANILLA)
    now = scouts.cost(Explanation())
    for hypothesis in scouts.hypotheses(FirstOff(0, 150)):
        assert not scouts.at_floor(hypothesis.explanation)
        assert scouts.cost(hypothesis.explanation) > 0.8 * now


def test_one_path_is_enough():
    paths: Any = None
    scouts: Any = None
    assert list(position_hypotheses(Explanation(forward="int8"), paths, scouts, None)) == []


def test_a_model_without_rotary_positions_is_not_asked_about_them():
    """Learned positions are counted: there is none between two of them, and none after the last."""
    scouts = Asked("positions multiplied by 1.07")
    assert not scouts.hypotheses(rope=False)
    assert scouts.forwards <= {"vanilla"}


@pytest.mark.parametrize(
    ("off", "positions", "begins"),
    [
        ([False, False, True, True], [3, 4, 5, 6], FirstOff(4, 5)),
        ([False, True, False, True], [3, 9, 12, 7], FirstOff(3, 7)),
        ([True, True], [5, 6], FirstOff(0, 5)),
        ([False, False], [5, 6], None),
    ],
)
def test_a_difference_begins_where_the_first_row_is_off(off, positions, begins):
    assert first_off(np.array(off), np.array(positions)) == begins


def test_positions_jump_at_the_boundary_and_stretch_from_the_start():
    positions = torch.arange(4)
    assert jumped(2)(positions).tolist() == [0, 1, 3, 4]
    assert stretched(1.5)(positions).tolist() == [0, 1.5, 3, 4.5]
