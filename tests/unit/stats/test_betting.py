import itertools
import math

import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.betting import FACTORS, count, log_mean_exp


def test_bets_are_fair_whatever_the_odds():
    """Summed exactly over all outcomes of eight draws: the mean of E is one."""
    q = np.array([0.01, 0.5, 0.9, 0.3, 0.999, 0.2, 0.05, 0.7])
    total = 0.0
    for outcome in itertools.product((False, True), repeat=len(q)):
        chance = np.prod(np.where(outcome, q, 1 - q))
        total += chance * math.exp(count(np.array(outcome)[:, None], q[:, None]).log_e()[0])
    assert total == pytest.approx(1.0, rel=1e-9)


def test_what_never_comes_and_what_always_comes():
    q = np.full((100, 2), 0.1)
    member = np.zeros((100, 2), dtype=np.bool_)
    member[:, 1] = True
    counts = count(member, q)
    never, always = counts.log_e()
    assert never == pytest.approx(-100 * math.log(0.9) - math.log(len(FACTORS)), abs=0.5)
    assert always == pytest.approx(-100 * math.log(0.1) - math.log(len(FACTORS)), abs=1e-9)
    assert counts.drawn.tolist() == [0, 100]
    assert counts.due == pytest.approx([10.0, 10.0])
    # One draw is enough to lose either bet, and the others go on.
    assert counts.log_e([1, 99]).tolist() < [never, always]


def test_one_impossible_draw_wins_no_more_than_the_largest_factor():
    counts = count(np.array([[True]] + [[False]] * 9), np.full((10, 1), 1e-9))
    assert counts.log_e()[0] <= math.log(16.0)


def test_no_draws_are_no_evidence():
    assert count(np.zeros((0, 3), np.bool_), np.zeros((0, 3))).log_e().tolist() == pytest.approx([0.0] * 3)


def test_what_is_no_probability_is_refused():
    with pytest.raises(InvalidValue):
        count(np.array([[True]]), np.array([[1.1]]))
    with pytest.raises(InvalidValue):
        count(np.array([[True]]), np.array([[0.1, 0.2]]))


def test_the_log_of_a_mean_survives_what_floats_do_not():
    assert log_mean_exp(np.array([-math.inf, 1000.0])) == pytest.approx(1000 - math.log(2))
    assert log_mean_exp(np.array([-math.inf, -math.inf])) == -math.inf
