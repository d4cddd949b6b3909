"""Which slice of [0, 1) belongs to which token, edge by edge."""

import math

import pytest
import torch

from zerodrift.sampler.choose import choose

HALVES = torch.tensor([0.5, 0.25, 0.0, 0.25], dtype=torch.float64).log()
JUST_BELOW_ONE = 1 - 2.0**-53


@pytest.mark.parametrize(
    ("uniform", "token"),
    [
        (0.0, 0),
        (math.nextafter(0.5, 0), 0),
        (0.5, 1),
        (math.nextafter(0.75, 0), 1),
        (0.75, 3),
        (JUST_BELOW_ONE, 3),
    ],
)
def test_a_slice_begins_at_its_lower_end(uniform, token):
    assert choose(HALVES, uniform) == token


@pytest.mark.parametrize("uniform", [0.0, 0.3, JUST_BELOW_ONE])
@pytest.mark.parametrize("only", [0, 1, 2])
def test_a_token_without_probability_is_never_chosen(only, uniform):
    logprobs_V = torch.full((3,), -torch.inf)
    logprobs_V[only] = 0.0
    assert choose(logprobs_V, uniform) == only


@pytest.mark.parametrize("scale", [0.9, 1.1])
def test_mass_that_rounding_lost_or_added_is_shared_by_all(scale):
    logprobs_V = HALVES + math.log(scale)
    assert choose(logprobs_V, 0.49) == 0
    assert choose(logprobs_V, 0.51) == 1
    assert choose(logprobs_V, JUST_BELOW_ONE) == 3


def test_sums_are_in_fp64():
    """In fp32 a hundred thousand equal tokens would not all have a slice at the far end."""
    size = 100_000
    logprobs_V = torch.full((size,), -math.log(size), dtype=torch.float32)
    for token in (1, 70_001, size - 1):
        assert choose(logprobs_V, (token + 0.5) / size) == token
