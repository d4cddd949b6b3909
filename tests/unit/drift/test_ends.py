import math

import numpy as np
import pytest

from zerodrift.drift.ends import HALF, MOST_DRAWS, count_ends, draws_needed, informative

LEVEL = 1e-6


def drawn(masses: np.ndarray, factor: float, seed: int) -> np.ndarray:
    odds = factor * masses / (1 - masses + factor * masses)
    return np.random.default_rng(seed).random(len(masses)) < odds


def test_half_of_the_odds_is_seen_with_the_draws_that_are_said_to_see_it():
    prefixes = np.array([0.6, 0.3, 0.2, 0.1])
    each = draws_needed(prefixes, 0.0, LEVEL)
    assert each is not None
    masses = np.repeat(prefixes, each)
    seen = [count_ends(masses, drawn(masses, HALF, seed), 0.0, LEVEL).p_value < LEVEL for seed in range(100)]
    assert sum(seen) >= 90
    power = count_ends(masses, drawn(masses, 1.0, 0), 0.0, LEVEL).power
    assert power.seen_from is not None
    assert HALF <= power.seen_from < 0.7


def test_a_healthy_engine_is_not_blamed():
    masses = np.repeat([0.6, 0.3, 0.2, 0.1], 200)
    least = min(count_ends(masses, drawn(masses, 1.0, seed), 0.0, LEVEL).p_value for seed in range(300))
    assert least > 1e-3


@pytest.mark.parametrize("by", [-0.3, 0.3])
def test_what_rounding_may_do_is_no_evidence(by):
    """Odds that are off by the whole band win nothing, and twice as rare an end is still seen beyond it."""
    masses = np.repeat([0.5, 0.3], 400)
    moved = [count_ends(masses, drawn(masses, math.exp(by), seed), 0.3, LEVEL).log_e for seed in range(50)]
    assert max(moved) < 5
    rare = count_ends(masses, drawn(masses, 0.3, 0), 0.3, LEVEL)
    assert rare.p_value < LEVEL
    frequent = count_ends(masses, drawn(masses, 3.0, 0), 0.3, LEVEL)
    assert frequent.p_value < LEVEL


def test_rare_ends_are_not_promised():
    rare = np.array([1e-4, 1e-5])
    assert draws_needed(rare, 0.0, LEVEL) is None
    none = np.zeros(MOST_DRAWS, dtype=np.bool_)
    ends = count_ends(np.full(MOST_DRAWS, 1e-4), none, 0.0, LEVEL)
    assert (ends.power.seen_from, ends.drawn) == (None, 0)
    assert ends.p_value > 0.5


def test_an_end_that_is_neither_certain_nor_rare_tells_most():
    gains = informative(np.array([0.001, 0.1, 0.5, 0.9, 0.999]))
    assert gains.argmax() == 2
    assert (gains > 0).all()
