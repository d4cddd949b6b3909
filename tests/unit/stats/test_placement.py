"""Points that are even, points that are not, and points that know of each other."""

import numpy as np
import pytest
from scipy import stats

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.placement import BINS, LEAST_PER_BIN, serial_dependence, uniformity

RNG = np.random.default_rng(0)
EVEN = RNG.random(2000)


def behind(count: int, length: int) -> np.ndarray:
    """Sequences of `length`, end to end."""
    return np.arange(count) % length != 0


def test_pearson_as_scipy_has_it():
    counts, _ = np.histogram(EVEN, bins=BINS, range=(0, 1))
    expected = stats.chisquare(counts)
    found = uniformity(EVEN)
    assert found.chi_square == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert not found.vacuous


def test_even_points_pass_and_middling_ones_do_not():
    assert uniformity(EVEN).p_value > 0.01
    assert uniformity(np.concatenate([EVEN, 0.4 + RNG.random(300) / 5])).p_value < 1e-9


def test_both_ends_are_points():
    assert uniformity(np.concatenate([EVEN, [0.0, 1.0]])).points == 2002


def test_neighbours_that_know_nothing_of_each_other():
    found = serial_dependence(EVEN, behind(2000, 20))
    assert found.pairs == 1900
    assert found.p_value > 1e-3


@pytest.mark.parametrize("sign", [1, -1])
def test_one_number_for_a_whole_sequence(sign):
    own = np.repeat(RNG.random(100), 20)
    points = own if sign == 1 else np.where(np.arange(2000) % 2, own, 1 - own)
    found = serial_dependence(points, behind(2000, 20))
    assert found.z * sign > 20
    assert found.p_value < 1e-80


def test_a_new_sequence_is_no_neighbour():
    """Equal from one sequence to the next, and independent within."""
    points = np.repeat(RNG.random(1000), 2)
    apart = np.zeros(2000, dtype=bool)
    apart[2::2] = True  # only pairs that straddle two numbers
    assert serial_dependence(points, apart).p_value > 0.01


@pytest.mark.parametrize(
    "test", [uniformity, lambda points: serial_dependence(points, behind(len(points), 500))]
)
def test_too_few_points_decide_nothing(test):
    few = RNG.random(BINS * LEAST_PER_BIN - 1)
    found = test(few)
    assert found.vacuous
    assert found.p_value == 1.0


@pytest.mark.parametrize("points", [[0.5, 1.5], [-0.1], [np.nan], []])
def test_points_outside_are_refused(points):
    with pytest.raises(InvalidValue):
        uniformity(points)


@pytest.mark.parametrize("follows", [[1, 0], [True, False], [False]])
def test_the_first_follows_nobody(follows):
    with pytest.raises(InvalidValue):
        serial_dependence([0.1, 0.2], follows)


@pytest.mark.parametrize("length", [50, 400])
def test_p_values_are_uniform_under_the_null(length):
    rng = np.random.default_rng(5)
    even, serial = [], []
    for _ in range(400):
        points = rng.random(4 * length)
        even.append(uniformity(points).p_value)
        serial.append(serial_dependence(points, behind(4 * length, length)).p_value)
    assert stats.kstest(even, "uniform").pvalue > 1e-3
    assert stats.kstest(serial, "uniform").pvalue > 1e-3
