import math

import numpy as np
import pytest

from zerodrift.stats import onset
from zerodrift.stats.onset import Onset
from zerodrift.stats.sequential import EProcess

FRESH = EProcess(clip=1.0, null_mean=0.0)


def after(*values: float) -> Onset:
    state = Onset(fresh=FRESH)
    for value in values:
        state = state.update(value)
    return state


def test_two_steps_by_hand():
    # E after one step of 1 is 1/2 of the bet and 1/2 not bet; a bet is worth the mean of 1 + f over its fractions.
    fractions = np.array([0.9, 0.5, 0.25, 0.1, 0.05, 0.02])
    one, two = (1 + fractions).mean(), ((1 + fractions) ** 2).mean()
    assert after(1.0).log_e == pytest.approx(math.log(one / 2 + 1 / 2))
    assert after(1.0, 1.0).log_e == pytest.approx(math.log(two / 2 + one / 6 + 1 / 3))


def test_the_state_before_stays():
    state = Onset(fresh=FRESH)
    state.update(1.0)
    assert state == Onset(fresh=FRESH)


@pytest.mark.parametrize("healthy", [0, 1, 3, 40, 90])
def test_a_lasting_change_is_found_and_dated(healthy):
    # 40 healthy steps are more than the candidates that are kept.
    state = after(*[-0.6] * healthy, *[0.8] * 40)
    assert state.alarm(1e-3)
    assert state.began == healthy


def test_one_e_process_alone_would_be_late():
    alone, count = FRESH, 0
    for value in [-0.6] * 60 + [0.8] * 40:
        alone, count = alone.update(value), count + 1
    assert not alone.alarm(1e-3)


def test_what_passes_stays_known():
    state = after(*[-0.5] * 10, *[1.0] * 20, *[-0.5] * 200)
    assert state.alarm(1e-3)
    assert state.began == 10
    assert state.log_e < 0 < state.log_peak


def test_a_healthy_recording_dates_nothing():
    state = after(*[-0.2] * 50)
    assert state.began is None
    assert state.log_peak == 0
    assert not state.alarm(0.5)


def test_values_that_open_no_step_start_no_bet():
    state = Onset(fresh=FRESH)
    for place, value in enumerate([-0.5] * 8 + [0.9] * 40):
        state = state.update(value, opens=place % 4 == 0)
    assert state.steps == 12
    assert state.began == 2
    assert Onset(fresh=FRESH).update(0.5, opens=False).steps == 1, "the first value opens the first step"


def test_the_likeliest_step_is_known_long_before_it_is_sure():
    state = after(-0.9, -0.9, -0.9, 0.5)
    assert state.began == 3
    assert state.log_peak == 0


def test_no_more_bets_than_can_be_held():
    assert len(after(*[-0.1] * 100).candidates) == onset.MOST_CANDIDATES


def test_the_mean_of_e_stays_at_one_if_nothing_is_wrong():
    # Fair coins sit exactly on the null. Were the shares of the stake to add up to more than one, this would show.
    generator = np.random.default_rng(5)
    values = [math.exp(after(*generator.choice([-1.0, 1.0], size=8)).log_e) for _ in range(1500)]
    assert np.mean(values) == pytest.approx(1.0, abs=4 * np.std(values) / math.sqrt(len(values)))


def test_false_alarms_are_as_rare_as_promised():
    generator = np.random.default_rng(6)
    alarms = sum(after(*generator.choice([-1.0, 1.0], size=40)).alarm(0.05) for _ in range(200))
    assert alarms <= 0.05 * 200
