"""Fixed numbers and edges; that it is noise at all is in tests/property/test_noise.py."""

from collections.abc import Iterator
from itertools import islice

import pytest

from zerodrift.core.request import MAX_SEED, SamplingParams
from zerodrift.sampler import noise

# The first five numbers of splitmix64 from the state 1234567, as widely published.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def splitmix64(state: int) -> Iterator[int]:
    """The generator as its authors write it: one that remembers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        value = state
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        yield value ^ (value >> 31)


def test_the_generator_below_is_the_published_one():
    assert list(islice(splitmix64(1234567), 5)) == PUBLISHED


@pytest.mark.parametrize("seed", [0, 1234567, MAX_SEED])
def test_a_number_is_a_step_of_a_generator_that_a_step_of_another_seeded(seed):
    for sample_index, state in enumerate(islice(splitmix64(seed), 3)):
        for position, bits in enumerate(islice(splitmix64(state), 5)):
            assert noise.uniform(seed, sample_index, position) == bits // 2**11 / 2**53


def test_no_two_coordinates_are_the_same_one():
    """Sums of coordinates would make (1, 0) and (0, 1) one."""
    numbers = {noise.uniform(seed, index, at) for seed in range(5) for index in range(5) for at in range(5)}
    assert len(numbers) == 125


@pytest.mark.parametrize(("drawn", "seed"), [(0, 0), (MAX_SEED, MAX_SEED)])
def test_a_drawn_seed_is_one_that_a_request_takes(monkeypatch, drawn, seed):
    asked = []
    monkeypatch.setattr(noise.secrets, "randbelow", lambda bound: asked.append(bound) or drawn)
    assert SamplingParams(seed=noise.draw_seed()).seed == seed
    assert asked == [MAX_SEED + 1]
