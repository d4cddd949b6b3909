from itertools import combinations, product

import numpy as np
import pytest
from scipy import special, stats

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats import twosample
from zerodrift.stats.twosample import (
    Strata,
    energy_distance,
    least_mean_p,
    mean_difference,
)

GENERATOR_SEED = 11


def test_energy_distance_is_that_of_scipy_and_of_its_definition():
    generator = np.random.default_rng(1)
    first, second = generator.integers(5, size=30) * 0.5, generator.normal(size=17)
    found = energy_distance(first, second, generator)
    assert found.statistic == pytest.approx(stats.energy_distance(first, second) ** 2)

    def mean_gap(x, y):
        return float(np.abs(x[:, None] - y[None, :]).mean())

    expected = 2 * mean_gap(first, second) - mean_gap(first, first) - mean_gap(second, second)
    assert found.statistic == pytest.approx(expected)


def test_permutation_p_values_are_those_of_all_labellings():
    first, second = np.array([0.0, 1.0, 1.0, 1.0]), np.array([0.0, 0.0, 1.0, 0.0, 0.0])
    found = mean_difference(first, second, np.random.default_rng(GENERATOR_SEED), permutations=20_000)
    # Rewards of 0 and 1: the exact two-sided answer is Fisher's, by enumeration of 126 labellings.
    pooled = np.concatenate((first, second))
    gaps = [pooled[list(i)].mean() - np.delete(pooled, list(i)).mean() for i in combinations(range(9), 4)]
    exact = np.mean(np.abs(gaps) >= abs(found.statistic) - 1e-9)
    assert found.statistic == pytest.approx(0.55)
    assert found.p_value == pytest.approx(exact, abs=0.015)


@pytest.mark.parametrize("test", [energy_distance, mean_difference])
def test_a_permutation_p_value_is_small_for_a_shift_and_one_for_equal_samples(test):
    generator = np.random.default_rng(2)
    rewards = (generator.random(80) < 0.5).astype(float)
    shifted = test(rewards, (generator.random(80) < 0.95).astype(float), generator, permutations=499)
    assert shifted.p_value == 1 / 500
    assert test(np.ones(5), np.ones(7), generator, permutations=99).p_value == 1.0
    assert test(rewards, rewards, generator, permutations=99).p_value == 1.0


def test_energy_distance_sees_a_spread_that_the_mean_hides():
    generator = np.random.default_rng(3)
    first, second = generator.normal(size=150), 2.5 * generator.normal(size=150)
    assert energy_distance(first, second, generator).p_value < 0.01
    assert mean_difference(first, second, generator, permutations=999).p_value > 0.01


def test_permutations_run_in_blocks(monkeypatch):
    monkeypatch.setattr(twosample, "_CELLS_PER_BLOCK", 30)
    found = mean_difference([0.0, 1.0, 0.0], [1.0, 1.0, 0.0], np.random.default_rng(0), permutations=99)
    assert 0 < found.p_value <= 1


def test_bad_samples_and_too_few_permutations_are_refused():
    generator = np.random.default_rng(0)
    with pytest.raises(NonFinite, match="second"):
        energy_distance([1.0], [np.nan], generator)
    with pytest.raises(InvalidValue, match="first is empty"):
        energy_distance([], [1.0], generator)
    with pytest.raises(InvalidValue, match="permutations is 10"):
        mean_difference([1.0], [2.0], generator, permutations=10)


# --- strata -----------------------------------------------------------------------------------------------------

Group = tuple[list[float], list[float]]
GROUPS: list[list[Group]] = [
    [([0.0, 1.0], [1.0, 1.0]), ([0.0], [0.0]), ([0.0, 0.0], [1.0, 0.0])],
    [([3.0, 0.0], [1.0]), ([7.5], [8.0, 9.5, 2.0])],
    [([5.0], [6.0]), ([1.0], [3.0]), ([2.0], [2.5]), ([9.0, 1.0], [])],
    [([1.0, 2.0, 2.0], [2.0, 0.0, 1.0])],
]


def differences(groups: list[Group]) -> np.ndarray:
    """The weighted mean of differences under every labelling, by its definition; the first is the observed one."""
    both = [group for group in groups if all(group)]
    weights = [len(x) * len(y) / (len(x) + len(y)) for x, y in both]
    gaps = []
    for x, y in both:
        pooled = np.array(x + y)
        choices = [list(inside) for inside in combinations(range(len(pooled)), len(x))]
        gaps.append([pooled[inside].mean() - np.delete(pooled, inside).mean() for inside in choices])
    return np.array([np.average(choice, weights=weights) for choice in product(*gaps)])


def flat(groups: list[Group]) -> tuple[list[float], list[float], Strata]:
    first, second = ([value for group in groups for value in group[side]] for side in (0, 1))
    ids = ([40 - n for n, group in enumerate(groups) for _ in group[side]] for side in (0, 1))
    return first, second, Strata(*ids)


@pytest.mark.parametrize("groups", GROUPS)
def test_labels_are_exchanged_within_groups_alone(groups):
    first, second, strata = flat(groups)
    everything = differences(groups)
    found = mean_difference(
        first, second, np.random.default_rng(GENERATOR_SEED), permutations=20_000, strata=strata
    )
    assert found.statistic == pytest.approx(everything[0])
    exact = np.mean(np.abs(everything) >= abs(everything[0]) - 1e-9)
    assert found.p_value == pytest.approx(exact, abs=0.015)


@pytest.mark.parametrize("groups", GROUPS)
def test_the_least_p_value_is_that_of_the_most_extreme_labelling(groups):
    everything = np.abs(differences(groups))
    assert least_mean_p(*flat(groups)) == pytest.approx(np.mean(everything >= everything.max() - 1e-9))


def test_the_least_p_value_of_tied_groups_is_one():
    assert least_mean_p([1.0, 0.0, 0.0], [0.0, 1.0], Strata([0, 1, 1], [1, 0])) == 1.0
    assert least_mean_p([2.0], [2.0]) == 1.0
    assert least_mean_p(np.zeros(60), np.ones(60)) == pytest.approx(2 / special.comb(120, 60), rel=1e-9)


@pytest.mark.parametrize("test", [energy_distance, mean_difference])
def test_one_group_is_no_strata(test):
    generator = np.random.default_rng(5)
    first, second = generator.normal(size=12), generator.normal(size=9)
    plain, grouped = (
        test(first, second, np.random.default_rng(0), permutations=199, strata=strata)
        for strata in (None, Strata(np.full(12, 3), np.full(9, 3)))
    )
    assert plain == grouped


def test_groups_far_apart_do_not_hide_a_difference():
    generator = np.random.default_rng(6)
    level = np.repeat(100 * generator.normal(size=20), 3)
    first, second = generator.normal(size=60) + level + 2, generator.normal(size=60) + level
    strata = Strata(np.repeat(np.arange(20), 3), np.repeat(np.arange(20), 3))
    for test in (mean_difference, energy_distance):
        assert test(first, second, generator, permutations=999).p_value > 0.5
        assert test(first, second, generator, permutations=999, strata=strata).p_value == 1 / 1000


def test_groups_that_compare_nothing_are_refused():
    generator = np.random.default_rng(0)
    with pytest.raises(InvalidValue, match="no group has values of both samples"):
        mean_difference([1.0, 2.0], [3.0], generator, strata=Strata([0, 1], [2]))
    with pytest.raises(InvalidValue, match="strata of second"):
        energy_distance([1.0], [2.0, 3.0], generator, strata=Strata([0], [0]))
