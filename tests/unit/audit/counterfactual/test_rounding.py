"""What rounding leaves behind, and what is only as large."""

import numpy as np
import pytest

from zerodrift.audit.counterfactual.rounding import is_rounding

RNG = np.random.default_rng(0)
LOGPROBS = -RNG.gamma(1.0, 1.5, 400)
SCALE = 0.01 * (1 + 3 * np.abs(LOGPROBS))
NOISE = RNG.normal(0, SCALE)


def test_rounding_is_rounding():
    assert is_rounding(NOISE, SCALE, LOGPROBS)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_factor_of_two_is_a_matter_of_kernels(factor):
    assert is_rounding(factor * NOISE, SCALE, LOGPROBS)


@pytest.mark.parametrize(
    "change",
    [
        lambda noise: 10 * noise,
        lambda noise: noise / 20,
        np.abs,
        lambda noise: noise + 0.02 * LOGPROBS + 0.03,
        lambda noise: RNG.uniform(-1, 1, len(noise)) * SCALE.mean(),
        np.zeros_like,
        lambda noise: np.full_like(noise, np.nan),
    ],
    ids=["too large", "too small", "one-sided", "slope on log p", "one size for all", "nothing", "unknown"],
)
def test_what_is_only_as_large_is_not(change):
    assert not is_rounding(change(NOISE.copy()), SCALE, LOGPROBS)


def test_one_wild_token_makes_no_mean():
    wild = NOISE.copy()
    wild[7] = 50.0
    assert is_rounding(wild, SCALE, LOGPROBS)


def test_tokens_of_one_probability_have_no_slope():
    scale = np.where(np.arange(400) % 2, 0.01, 0.1)
    assert is_rounding(RNG.normal(0, scale), scale, np.full(400, -1.0))
