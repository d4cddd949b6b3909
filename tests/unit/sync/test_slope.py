import math

import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.sync.slope import FALSE_ALARM, critical, excess, fit_slope

TOKENS, LENGTH = 1024, 16
SEQUENCE = np.repeat(np.arange(TOKENS // LENGTH), LENGTH)
LIMIT = critical(2)


def noisy(slope, noise, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.normal(size=TOKENS)
    return fit_slope(p, slope * p + noise * rng.normal(size=TOKENS), SEQUENCE, LIMIT)


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.0, 2.0])
def test_the_slope_is_found_and_bounded(slope):
    fit = noisy(slope, 0.3)
    low, high = fit.interval
    assert low < slope < high
    assert high - low < 0.2
    assert not fit.refuses(slope)
    assert fit.refuses(slope - 0.5)
    assert fit.refuses(slope + 0.5)


def test_the_interval_is_what_is_not_refused():
    fit = noisy(1.0, 2.0)
    for end, outward in zip(fit.interval, (-1, 1), strict=True):
        assert abs(fit.statistic(end)) == pytest.approx(LIMIT)
        assert fit.refuses(end + 0.01 * outward)
        assert not fit.refuses(end - 0.01 * outward)


def test_equal_bits_are_one_point():
    fit = noisy(1.0, 0.0)
    assert fit.interval == pytest.approx((1.0, 1.0))
    assert not fit.refuses(1.0)
    assert fit.refuses(0.0)


def test_too_few_sequences_refuse_nothing():
    few = slice(0, 16 * LENGTH)
    p = np.random.default_rng(0).normal(size=TOKENS)[few]
    fit = fit_slope(p, 0 * p, SEQUENCE[few], LIMIT)
    assert fit.interval == (-math.inf, math.inf)
    assert not fit.refuses(1.0)
    needed = fit.tokens_for(0.5)
    assert needed is not None
    assert 16 * LENGTH < needed < 32 * LENGTH


def test_what_moves_nothing_has_no_slope():
    fit = fit_slope(np.zeros(TOKENS), np.ones(TOKENS), SEQUENCE, LIMIT)
    assert (fit.moves, fit.estimate, fit.tokens_for(0.5)) == (False, 0.0, None)
    assert not fit.refuses(1.0)


def test_as_many_tokens_as_it_says_do():
    """Noise of four times the signal: too little with 1,024 tokens, and enough with what is asked for."""
    asked = noisy(1.0, 4.0).tokens_for(0.5)
    assert asked is not None
    assert asked > TOKENS
    rng = np.random.default_rng(1)
    enough = 0
    for _ in range(40):
        p = rng.normal(size=asked)
        fit = fit_slope(p, p + 4 * rng.normal(size=asked), np.arange(asked) // LENGTH, LIMIT)
        low, high = fit.interval
        enough += low > 0.5 and high < 1.5
    assert enough >= 34  # 38 are due


@pytest.mark.parametrize("tails", ["normal", "cauchy", "one sequence"])
def test_false_alarms_stay_below_the_bound(tails):
    """At a level of 1 in 20 and errors of any tails, one noise for all tokens of a sequence among them."""
    rng = np.random.default_rng(2)
    limit, alarms, times = critical(2, level=0.05), 0, 2000
    for _ in range(times):
        p = rng.exponential(size=TOKENS)
        error = {
            "normal": lambda: rng.normal(size=TOKENS),
            "cauchy": lambda: rng.standard_cauchy(size=TOKENS),
            "one sequence": lambda: np.repeat(rng.normal(size=TOKENS // LENGTH), LENGTH),
        }[tails]()
        alarms += fit_slope(p, p + error, SEQUENCE, limit).refuses(1.0)
    assert alarms <= 0.05 * times


def test_tokens_alone_would_raise_more():
    """The control: by tokens in place of sequences the bound does not hold, where tokens of one err together."""
    rng = np.random.default_rng(3)
    limit, alarms = critical(2, level=0.05), 0
    for _ in range(500):
        p = rng.exponential(size=TOKENS)
        error = np.repeat(rng.normal(size=TOKENS // LENGTH), LENGTH)
        alarms += fit_slope(p, p + error, np.arange(TOKENS), limit).refuses(1.0)
    assert alarms > 0.2 * 500


def test_more_than_before_is_seen_and_as_much_is_not():
    rng = np.random.default_rng(4)
    usual, same = np.abs(rng.normal(size=(2, TOKENS)))
    assert abs(excess(same, usual, SEQUENCE)) < LIMIT
    assert excess(2 * same, usual, SEQUENCE) > LIMIT
    assert excess(usual, usual, SEQUENCE) == 0


def test_the_limit_is_that_of_the_bound():
    assert 5 * math.exp(-(critical(5) ** 2) / 2) == pytest.approx(FALSE_ALARM)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidValue):
        fit_slope(np.zeros(3), np.zeros(4), np.zeros(3, dtype=int), LIMIT)
    with pytest.raises(NonFinite):
        fit_slope(np.array([np.nan]), np.zeros(1), np.zeros(1, dtype=int), LIMIT)


def test_a_token_that_is_moved_much_is_one_witness():
    """Without weights it would be nearly the only one, and nothing could be refused."""
    p = np.random.default_rng(5).normal(size=TOKENS)
    p[7] = 100.0
    fit = fit_slope(p, 0 * p, SEQUENCE, LIMIT)
    assert fit.effective > 50
    assert fit.refuses(1.0)
    plain = np.bincount(SEQUENCE, p**2)
    assert plain.sum() ** 2 / (plain**2).sum() < 2
