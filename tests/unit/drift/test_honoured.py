import numpy as np
import pytest

from zerodrift.drift.honoured import Honoured, Value, bets

ASKED = np.array([0.5, 0.3, 0.2, 0.0])
OTHERS = np.array([[0.4, 0.3, 0.2, 0.1], [0.6, 0.4, 0.0, 0.0]])


@pytest.mark.parametrize("epsilon", [0.0, 0.02, 0.3])
def test_a_bet_is_fair_for_every_distribution_that_rounding_may_make(epsilon):
    won = np.exp(bets(ASKED, OTHERS, epsilon).log_e_AV)
    for place in range(4):
        moved = (1 - epsilon) * ASKED + epsilon * np.eye(4)[place]
        assert (won @ moved <= 1 + 1e-9).all()


def test_what_is_expected_is_what_the_other_value_wins():
    rng = np.random.default_rng(0)
    made = bets(ASKED, OTHERS, 1e-3)
    for number, other in enumerate(OTHERS):
        won = made.log_e_AV[number][rng.choice(4, 20_000, p=other)]
        assert won.mean() == pytest.approx(made.expected_A[number], abs=4 * won.std() / 20_000**0.5)
        assert won.var() == pytest.approx(made.variance_A[number], rel=0.1)
        assert made.expected_A[number] > 0


def test_what_shares_nothing_with_the_request_is_not_bet_on_without_a_price():
    nothing = bets(np.array([1.0, 0.0]), np.array([[0.0, 1.0]]), 0.0)
    assert (nothing.log_e_AV == 0).all()


def honoured(log_e: float, expected: float, off: float = 0.0) -> Honoured:
    values = (Value(1.0, log_e, expected, 1.0), Value(0.5, -5.0, 5 * expected, 1.0))
    return Honoured("top_p", 0.8, 100, values, off)


def test_draws_and_numbers_are_both_asked():
    level = 1e-6
    assert honoured(0.0, 30.0).right(level)
    assert not honoured(30.0, 30.0).right(level)
    assert not honoured(0.0, 30.0, off=0.1).right(level)
    assert honoured(0.0, 30.0, off=0.1).by_draws(level)


def test_power_names_the_nearest_value_that_would_be_seen():
    near, far, none = (honoured(0.0, expected).nearest_seen(1e-6) for expected in (30.0, 5.0, 1.0))
    assert near is not None
    assert far is not None
    assert (near.value, far.value, none) == (1.0, 0.5, None)
