"""Intervals and tests: laws that hold for all data, and p-values that are uniform under the null."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from zerodrift.stats.intervals import bootstrap_mean
from zerodrift.stats.martingale import sampling_fidelity
from zerodrift.stats.twosample import energy_distance, mean_difference

steady = settings(deadline=None, max_examples=40)
values = hnp.arrays(np.float64, st.integers(2, 25), elements=st.floats(-100, 100))


@steady
@given(values, st.floats(0.1, 10), st.floats(-50, 50), st.integers(0, 2**32))
def test_bootstrap_intervals_move_and_stretch_with_the_values(
    data: np.ndarray, scale: float, shift: float, seed: int
) -> None:
    ids = np.arange(data.size) // 2 if data.size > 3 else np.arange(data.size)
    plain = bootstrap_mean(data, ids, np.random.default_rng(seed), resamples=100)
    moved = bootstrap_mean(scale * data + shift, ids, np.random.default_rng(seed), resamples=100)
    assert data.min() - 1e-9 <= plain.low <= plain.high <= data.max() + 1e-9
    np.testing.assert_allclose(
        [moved.estimate, moved.low, moved.high],
        [scale * part + shift for part in (plain.estimate, plain.low, plain.high)],
        atol=1e-8,
    )


@steady
@given(values, values, st.integers(0, 2**32))
def test_two_sample_tests_are_symmetric_and_their_p_values_are_probabilities(
    first: np.ndarray, second: np.ndarray, seed: int
) -> None:
    def all_tests(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
        generator = np.random.default_rng(seed)
        found = [test(x, y, generator, permutations=99) for test in (energy_distance, mean_difference)]
        return [(abs(one.statistic), one.p_value) for one in found]

    forward, backward = all_tests(first, second), all_tests(second, first)
    np.testing.assert_allclose(
        [one[0] for one in forward], [one[0] for one in backward], rtol=1e-6, atol=1e-9
    )
    assert all(0 < p_value <= 1 for _, p_value in forward + backward)


def test_p_values_of_two_sample_tests_are_uniform_under_the_null() -> None:
    generator = np.random.default_rng(0)
    found: dict[str, list[float]] = {}
    for _ in range(300):
        x, y = generator.normal(size=40), generator.normal(size=30)
        for one in (
            energy_distance(x, y, generator, permutations=199),
            mean_difference(x, y, generator, permutations=199),
        ):
            found.setdefault(one.test, []).append(one.p_value)
    for p_values in found.values():
        assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_p_values_for_discrete_rewards_are_valid_under_the_null() -> None:
    generator = np.random.default_rng(1)
    p_values = np.array(
        [
            mean_difference(
                generator.choice([0.0, 0.5, 1.0], size=25),
                generator.choice([0.0, 0.5, 1.0], size=40),
                generator,
                permutations=199,
            ).p_value
            for _ in range(300)
        ]
    )
    # Ties make it conservative; four standard errors of slack for 300 runs.
    for alpha in (0.05, 0.1, 0.3):
        assert (p_values <= alpha).mean() <= alpha + 4 * np.sqrt(alpha * (1 - alpha) / 300)


@steady
@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(2, 5))
def test_z_grows_as_the_root_of_repetition_and_ignores_order(tokens: int, seed: int, times: int) -> None:
    generator = np.random.default_rng(seed)
    logprobs, entropies = -generator.exponential(size=tokens), generator.uniform(0.1, 2, size=tokens)
    variances = generator.uniform(0.5, 2, size=tokens)
    once = sampling_fidelity(logprobs, entropies, variances)
    again = sampling_fidelity(*(np.tile(part[::-1], times) for part in (logprobs, entropies, variances)))
    np.testing.assert_allclose(again.z, once.z * np.sqrt(times), rtol=1e-9, atol=1e-12)
    assert 0 <= again.p_value <= once.p_value <= 1
