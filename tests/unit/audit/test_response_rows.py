"""The range of rows whose update a difference follows: found to the row where rows show, and said where they do not."""

import numpy as np
import pytest

from zerodrift.audit.response.rows import best_rows

TOKENS = 64


@pytest.mark.parametrize(
    ("total", "first", "last"),
    [(512, 256, 512), (512, 0, 128), (1000, 313, 622), (7, 2, 5), (2, 1, 2), (3000, 1400, 1611), (90, 0, 90)],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_range_is_found_to_the_row(total, first, last, seed):
    rng = np.random.default_rng(seed)
    slopes = rng.normal(size=(TOKENS, total)).astype(np.float32)
    found = best_rows(-slopes[:, first:last].sum(axis=1), slopes)
    assert (found.first, found.last) == (first, last)
    assert found.first_between == (first, first)
    assert found.last_between == (last, last)


def test_noise_widens_what_is_said_of_the_ends():
    within, widths = 0, []
    for seed in range(20):
        rng = np.random.default_rng(1000 + seed)
        slopes = rng.normal(size=(TOKENS, 512)).astype(np.float32)
        effect = -slopes[:, 200:400].sum(axis=1)
        found = best_rows(effect + rng.normal(0, 0.6 * effect.std(), TOKENS), slopes)
        for end, (low, high) in ((200, found.first_between), (400, found.last_between)):
            within += low <= end <= high
            widths.append(high - low)
        assert found.first_between[0] <= found.first <= found.first_between[1]
        assert found.last_between[0] <= found.last <= found.last_between[1]
    assert within >= 36
    assert 2 < np.mean(widths) < 100


def test_rows_that_no_token_has_are_in_doubt_and_the_end_is_round():
    """Of an embedding only the rows of tokens that occur show anything."""
    rng = np.random.default_rng(0)
    slopes = np.zeros((TOKENS, 1000))
    used = np.array([3, 90, 222, 400, 480, 520, 700, 801, 990])
    slopes[:, used] = rng.normal(size=(TOKENS, len(used)))
    found = best_rows(-slopes[:, 500:].sum(axis=1), slopes)
    assert found.first_between == (481, 520)
    assert found.last_between == (991, 1000)
    assert (found.first, found.last) == (500, 1000)
