import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zerodrift.stats.sequential import Cusum, EProcess

steady = settings(deadline=None, max_examples=60)
walks = st.lists(st.floats(-6, 6), min_size=1, max_size=40)


def run(state: Cusum | EProcess, values: list[float]) -> Cusum | EProcess:
    for z in values:
        state = state.update(z)
    return state


@steady
@given(walks, st.floats(0, 2))
def test_cusum_is_the_walk_above_its_own_minimum(values: list[float], allowance: float) -> None:
    state = run(Cusum(allowance=allowance, clip=3.0), values)
    walk = np.concatenate(([0.0], np.cumsum(np.clip(values, -3.0, 3.0) - allowance)))
    assert isinstance(state, Cusum)
    assert math.isclose(state.score, walk[-1] - walk.min(), abs_tol=1e-9)
    assert 0 <= state.score <= len(values) * (3.0 - allowance) + 1e-9
    assert state.steps == len(values)
    assert 0 <= state.last_zero <= state.steps


@steady
@given(walks, st.floats(0, 3))
def test_detectors_never_fall_when_every_value_rises(values: list[float], rise: float) -> None:
    higher = [z + rise for z in values]
    for start, read in ((Cusum(), "score"), (EProcess(), "log_e")):
        assert getattr(run(start, values), read) <= getattr(run(start, higher), read) + 1e-9


@steady
@given(walks, st.floats(-3, 3), st.randoms(use_true_random=False))
def test_e_process_does_not_depend_on_order_and_its_p_value_only_falls(
    values: list[float], null_mean: float, random: object
) -> None:
    state, smallest = EProcess(null_mean=null_mean), 1.0
    for z in values:
        state = state.update(z)
        assert 0 < state.p_value <= smallest
        smallest = state.p_value
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = run(EProcess(null_mean=null_mean), shuffled)
    assert isinstance(again, EProcess)
    assert math.isclose(again.log_e, state.log_e, abs_tol=1e-9)


@steady
@given(walks, st.floats(-3.5, 3.5), st.floats(0, 1))
def test_a_bet_at_the_null_is_fair_from_every_state(
    past: list[float], null_mean: float, share: float
) -> None:
    # Two values around the null mean, weighted to average it: the expected next E is the present one.
    state = run(EProcess(null_mean=null_mean), past)
    assert isinstance(state, EProcess)
    low, high = null_mean - share * (4 + null_mean), null_mean + (1 - share) * (4 - null_mean)
    up = 0.5 if high == low else (null_mean - low) / (high - low)
    expected = up * math.exp(state.update(high).log_e - state.log_e)
    expected += (1 - up) * math.exp(state.update(low).log_e - state.log_e)
    assert math.isclose(expected, 1.0, rel_tol=1e-9)
