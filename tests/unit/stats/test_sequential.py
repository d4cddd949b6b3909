import itertools
import math

import msgspec
import numpy as np
import pytest
from river import drift

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats.sequential import Cusum, EProcess


def test_cusum_by_hand():
    state = Cusum(allowance=0.5, threshold=3.0, clip=2.0)
    scores, zeros = [], []
    for z in (-1.0, 1.0, 10.0, 0.0, 2.5):
        state = state.update(z)
        scores.append(state.score)
        zeros.append(state.last_zero)
    assert scores == [0.0, 0.5, 2.0, 1.5, 3.0]
    assert zeros == [1, 1, 1, 1, 1]
    assert state.alarm
    assert state.steps == 5


def test_one_broken_value_cannot_alarm_and_a_lasting_shift_is_dated():
    assert not Cusum().update(1e9).alarm
    state = Cusum()
    for z in [-0.2] * 50 + [2.0] * 6:
        state = state.update(z)
    assert state.alarm
    assert state.last_zero == 50


def test_cusum_alarms_when_page_hinkley_of_river_does():
    # River's detector is the sum of x - running mean - delta above its own minimum: the same reflection of a walk.
    generator = np.random.default_rng(2)
    for _ in range(20):
        values = generator.normal(size=300) + (np.arange(300) > 150) * generator.uniform(0, 2)
        oracle = drift.PageHinkley(min_instances=1, delta=0.3, threshold=9.0, alpha=1.0, mode="up")
        state, seen = Cusum(allowance=0.3, threshold=9.0, clip=1e6), 0.0
        for count, value in enumerate(values, start=1):
            seen += value
            state = state.update(value - seen / count)
            oracle.update(value)
            assert state.alarm == oracle.drift_detected
            if state.alarm:
                break


def test_cusum_false_alarms_are_as_rare_as_siegmund_says():
    # k = 0.5, h = 4: (e^{2kb} - 2kb - 1) / 2k² with b = 5.166 is 338 steps to a false alarm.
    generator = np.random.default_rng(3)
    lengths = []
    for _ in range(200):
        state = Cusum(threshold=4.0)
        while not state.alarm:
            state = state.update(generator.normal())
        lengths.append(state.steps)
    assert np.mean(lengths) == pytest.approx(338, rel=0.2)


@pytest.mark.parametrize("null_mean", [0.0, 0.3, -0.4])
def test_e_process_has_mean_one_over_all_paths_of_a_fair_coin(null_mean):
    # Values ±1 with mean exactly null_mean: summed over all 2^8 paths, E E_T must be 1.
    up = (1 + null_mean) / 2
    total = 0.0
    for path in itertools.product((-1.0, 1.0), repeat=8):
        state = EProcess(clip=1.0, null_mean=null_mean)
        for z in path:
            state = state.update(z)
        total += math.exp(state.log_e) * math.prod(up if z > 0 else 1 - up for z in path)
    assert total == pytest.approx(1.0, abs=1e-12)


def paths_that_alarm(values: np.ndarray, alpha: float, null_mean: float = 0.0) -> float:
    alarms = 0
    for path in values:
        state = EProcess(null_mean=null_mean)
        for z in path:
            state = state.update(z)
            if state.alarm(alpha):
                alarms += 1
                break
    return alarms / len(values)


def test_e_process_keeps_its_promise_under_nulls_of_any_shape():
    generator, alpha = np.random.default_rng(5), 0.1
    normal = generator.normal(size=(120, 200))
    # Spread that depends on the past, and rare large values: no independence, no Gaussian.
    bursts = generator.normal(size=(120, 200)) * np.where(np.roll(np.abs(normal), 1, axis=1) > 1, 2.0, 0.3)
    rare = np.where(generator.random((120, 200)) < 0.2, 4.0, -1.0)
    for null in (normal, bursts, rare):
        assert paths_that_alarm(null, alpha) <= alpha


def test_e_process_finds_a_shift_and_an_overbold_one_would_be_caught():
    generator = np.random.default_rng(6)
    shifted = generator.normal(size=(20, 400)) + 0.5
    assert paths_that_alarm(shifted, 0.001) == 1.0
    # The simulation above can fail: pretend that the null mean is lower than it is and false alarms abound.
    assert paths_that_alarm(generator.normal(size=(50, 250)), 0.1, null_mean=-0.3) > 0.5


def test_e_process_finds_a_shift_of_a_fiftieth_of_a_deviation():
    """51 up, 49 down, over and over: every stake but the smallest loses to the noise."""
    state = EProcess(clip=1.0)
    for step in range(30_000):
        state = state.update(1.0 if step * 51 % 100 < 51 else -1.0)
    assert state.alarm(0.05)


def test_e_process_p_value_remembers_the_peak():
    state = EProcess(clip=1.0)
    assert state.p_value == 1.0
    for z in [1.0] * 10:
        state = state.update(z)
    peak = state.p_value
    assert peak == pytest.approx(math.exp(-state.log_e))
    for z in [-1.0] * 20:
        state = state.update(z)
    assert state.log_e < 0
    assert state.p_value == peak
    assert state.alarm(peak)
    assert not state.alarm(peak * 0.99)


@pytest.mark.parametrize("start", [Cusum(), EProcess()])
def test_states_are_values(start):
    before = msgspec.json.encode(start)
    after = start.update(1.5)
    assert msgspec.json.encode(start) == before
    assert msgspec.json.decode(msgspec.json.encode(after), type=type(after)) == after
    assert after.steps == 1
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFinite, match="z is"):
            start.update(bad)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Cusum, {"allowance": -1.0}),
        (Cusum, {"allowance": 4.0}),
        (Cusum, {"threshold": 0.0}),
        (Cusum, {"score": -1.0}),
        (Cusum, {"clip": math.inf}),
        (EProcess, {"clip": 0.0}),
        (EProcess, {"null_mean": 5.0}),
        (EProcess, {"null_mean": -4.0}),
        (EProcess, {"log_wealths": (0.0,)}),
    ],
)
def test_settings_that_cannot_work_are_refused(kind, settings):
    with pytest.raises(InvalidValue):
        kind(**settings)


@pytest.mark.parametrize("alpha", [0.0, 1.5, math.nan])
def test_alpha_is_a_probability(alpha):
    with pytest.raises(InvalidValue, match="alpha"):
        EProcess().alarm(alpha)
