"""One uniform number per (seed, sample index, position): uniform, uncorrelated, and a function of nothing else."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from zerodrift.core.request import MAX_SEED
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import draw_seed, uniform

LARGEST = 1 - 2.0**-53
"""The largest number that `uniform` can return."""
AXES = ("seed", "sample index", "position")
ORIGINS = ((0, 0, 0), (MAX_SEED - 20_000, 3, 1000), (2**40 + 17, 0, 0))
DRAWS = 10_000

Noise = Callable[[int, int, int], float]


def along(noise: Noise, axis: int, origin: tuple[int, int, int], draws: int = DRAWS) -> NDArray[np.float64]:
    """Numbers at neighbouring coordinates."""
    coordinates = list(origin)
    values = []
    for step in range(draws):
        coordinates[axis] = origin[axis] + step
        values.append(noise(*coordinates))
    return np.array(values)


def check_noise(noise: Noise, axis: int, origin: tuple[int, int, int]) -> None:
    """In [0, 1), uniform, neighbours independent, no number twice."""
    values = along(noise, axis, origin)
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == len(values)
    assert stats.kstest(values, "uniform").pvalue > 1e-5
    for lag in (1, 2, 7):
        correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(values)), (lag, correlation)
    # Pairs of neighbours fill the unit square: a lattice would show here, where correlation is blind.
    grid, _, _ = np.histogram2d(values[::2], values[1::2], bins=16, range=((0, 1), (0, 1)))
    assert stats.chisquare(grid.ravel()).pvalue > 1e-5
    # The low bits are as good as the high ones.
    low = (values * 2.0**53).astype(np.uint64) & np.uint64(15)
    assert stats.chisquare(np.bincount(low.astype(np.int64), minlength=16)).pvalue > 1e-5


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("axis", range(3), ids=AXES)
def test_it_is_noise_along_every_axis(axis: int, origin: tuple[int, int, int]) -> None:
    check_noise(uniform, axis, origin)


PLANTED: dict[str, Noise] = {
    "a weyl sequence": lambda s, i, p: math.modf((s + i + p) * 0.6180339887498949)[0],
    "fp32": lambda s, i, p: float(np.float32(uniform(s, i, p))),
    "not quite uniform": lambda s, i, p: uniform(s, i, p) ** 1.1,
    "neighbours in pairs": lambda s, i, p: uniform(s // 2, i // 2, p // 2),
    "neighbours alike": lambda s, i, p: (uniform(s, i, p) + uniform(s + 1, i + 1, p + 1)) / 2,
    "reaches one": lambda s, i, p: 1.0 if p == 5 or s == 5 or i == 5 else uniform(s, i, p),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("axis", range(3), ids=AXES)
def test_planted_noise_is_seen(axis: int, name: str) -> None:
    with pytest.raises(AssertionError):
        check_noise(PLANTED[name], axis, (0, 0, 0))


def test_rows_of_neighbouring_coordinates_are_uncorrelated() -> None:
    """A sample's whole row of positions, against the rows of the next sample and of the next seed."""
    row = along(uniform, 2, (11, 0, 0))
    for other in ((12, 0, 0), (11, 1, 0), (10, 1, 0), (12, 1, 0)):
        correlation = np.corrcoef(row, along(uniform, 2, other))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(DRAWS), (other, correlation)


@given(
    st.integers(0, MAX_SEED), st.integers(0, 2**20), st.integers(0, 2**20), st.randoms(use_true_random=True)
)
def test_it_depends_on_its_coordinates_alone(
    seed: int, index: int, position: int, chaos: random.Random
) -> None:
    first = uniform(seed, index, position)
    random.seed(chaos.random())
    torch.manual_seed(chaos.randrange(2**31))
    uniform(position, seed, index)
    assert uniform(seed, index, position) == first
    assert 0 <= first <= LARGEST
    assert (first * 2.0**53).is_integer()


def test_the_numbers_are_those_of_splitmix64() -> None:
    """Computed a second way; a change would make every recorded seed a lie."""

    def splitmix(state: int, steps: int) -> int:
        with np.errstate(over="ignore"):
            z = np.uint64(state) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(steps)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return int(z ^ (z >> np.uint64(31)))

    # The first output of the published generator seeded with 0.
    assert splitmix(0, 1) == 0xE220A8397B1DCDAF
    for seed, index, position in ((0, 0, 0), (1, 0, 0), (42, 3, 17), (MAX_SEED, 7, 100_000)):
        bits = splitmix(splitmix(seed, index + 1), position + 1)
        assert uniform(seed, index, position) == (bits >> 11) / 2**53


def test_recorded_numbers_stay() -> None:
    recorded = [uniform(0, 0, 0), uniform(1, 0, 0), uniform(42, 3, 17), uniform(MAX_SEED, 7, 100_000)]
    assert recorded == [0.6524484863740322, 0.36818951565166946, 0.17206076763878475, 0.13921357663018774]


def test_drawn_seeds_are_seeds_and_differ() -> None:
    seeds = {draw_seed() for _ in range(200)}
    assert len(seeds) == 200
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    # One in 2**100 that all of 200 lie in the lower half.
    assert max(seeds) > MAX_SEED // 2


WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-300, 1.0), st.floats(1e-12, 1.0)), min_size=1, max_size=30
).filter(any)
UNIFORMS = st.one_of(
    st.sampled_from([0.0, 2.0**-53, 0.5 - 2.0**-54, 0.5, LARGEST - 2.0**-53, LARGEST]),
    st.integers(0, 2**53 - 1).map(lambda bits: bits * 2.0**-53),
)


@given(WEIGHTS, UNIFORMS, st.sampled_from([torch.float32, torch.float64]))
def test_no_token_of_probability_zero_is_chosen(
    weights: list[float], number: float, dtype: torch.dtype
) -> None:
    """Zeros at both ends and in between, numbers at both ends of the range, sums that are not exactly one."""
    logprobs_V = torch.tensor(weights, dtype=dtype).log()
    if bool((logprobs_V == -torch.inf).all()):
        return  # fp32 has no 1e-300
    token = choose(logprobs_V, number)
    assert 0 <= token < len(weights)
    assert logprobs_V[token] > -torch.inf


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any), st.integers(0, 63))
def test_the_token_is_the_one_whose_slice_holds_the_number(masses: list[int], numerator: int) -> None:
    """On a grid where the arithmetic is exact to far below the distance between grid points."""
    number = (2 * numerator + 1) / 128
    total, below = sum(masses), 0
    expected = -1
    for token, mass in enumerate(masses):
        if below <= number * total < below + mass:
            expected = token
        below += mass
    # Slices begin at multiples of 1/total, and rounding decides there.
    if abs(number * total - round(number * total)) > 1e-9:
        assert choose(torch.tensor(masses, dtype=torch.float64).log(), number) == expected
