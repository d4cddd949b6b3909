"""The regression by itself, on numbers whose making is known."""

import numpy as np
import pytest

from zerodrift.audit.response.pursuit import LEAST_R2, MOST_KNOBS, Pursuit, alike, pursue, singles
from zerodrift.stats.arrays import Floats

SEQUENCES, WIDTH, KNOBS = 30, 8, 400
GROUPS = np.repeat(np.arange(SEQUENCES), WIDTH)


def slopes(seed: int = 0, knobs: int = KNOBS) -> Floats:
    """Tails as heavy as derivatives have."""
    matrix: Floats = np.random.default_rng(seed).standard_t(3, (len(GROUPS), knobs)).astype(np.float32)
    return matrix


def searched(steps: Floats, matrix: Floats, low: float = -2.0, high: float = 2.0, seed: int = 1) -> Pursuit:
    ends = np.full(matrix.shape[1], low), np.full(matrix.shape[1], high)
    return pursue(steps, matrix, GROUPS, ends, np.random.default_rng(seed))


def test_one_knob_is_found_with_its_value():
    matrix = slopes()
    found = searched(-0.013 * matrix[:, 71].astype(float), matrix)
    assert found.follows
    assert found.chosen == (71,)
    assert found.values == pytest.approx((-0.013,), rel=1e-4)
    assert found.r2 > 0.999 > found.null


def test_two_knobs_are_found_together():
    matrix = slopes().astype(float)
    found = searched(0.02 * matrix[:, 5] - 0.01 * matrix[:, 300], matrix.astype(np.float32))
    assert dict(zip(found.chosen, found.values, strict=True)) == pytest.approx(
        {5: 0.02, 300: -0.01}, rel=1e-3
    )
    assert found.r2 > 0.999


def test_the_best_alone_come_with_their_values_and_within_their_bounds():
    matrix = slopes().astype(float)
    steps = 0.02 * matrix[:, 5] - 0.01 * matrix[:, 300]
    ends = np.full(KNOBS, -2.0), np.full(KNOBS, 2.0)
    best = singles(steps, matrix.astype(np.float32), ends, 2)
    assert [column for column, _ in best] == [5, 300]
    assert best[0][1] == pytest.approx(0.02, rel=0.2)
    ends[0][300] = 0.0
    assert 300 not in [column for column, _ in singles(steps, matrix.astype(np.float32), ends, 5)]


def test_a_knob_under_as_much_noise_is_still_followed():
    matrix, rng = slopes(), np.random.default_rng(3)
    signal = 0.1 * matrix[:, 9].astype(float)
    found = searched(signal + rng.normal(0, signal.std() * 0.5, len(signal)), matrix)
    assert found.chosen[0] == 9
    assert found.follows
    assert 0.6 < found.r2 < 0.95


@pytest.mark.parametrize("seed", range(20))
def test_noise_follows_nothing(seed):
    """Also where its tails are heavy, and where whole sequences are off together."""
    rng = np.random.default_rng(100 + seed)
    noise = rng.standard_t(2, len(GROUPS)) * np.repeat(rng.lognormal(0, 1, SEQUENCES), WIDTH)
    found = searched(noise, slopes(seed), seed=seed)
    assert not found.follows
    assert found.r2 < LEAST_R2


def test_a_value_that_nobody_could_have_set_is_not_taken():
    """Column 71 would need −3: the best that is possible is no explanation."""
    matrix = slopes()
    found = searched(-3.0 * matrix[:, 71].astype(float), matrix)
    assert 71 not in found.chosen
    assert not found.follows


def test_of_equals_the_first_is_named_and_the_others_are_known():
    matrix = slopes()
    matrix[:, 200] = 2 * matrix[:, 17]
    found = searched(0.01 * matrix[:, 200].astype(float), matrix)
    assert found.chosen == (17,)
    assert found.values == pytest.approx((0.02,), rel=1e-4)
    assert list(alike(matrix, 17)) == [200]
    assert list(alike(matrix, 18)) == []


def test_no_more_knobs_than_pay():
    matrix = slopes().astype(float)
    truth = matrix[:, :8] @ np.full(8, 0.01)
    found = searched(truth, matrix.astype(np.float32))
    assert len(found.chosen) <= MOST_KNOBS


def test_one_sequence_has_no_other_half():
    matrix = slopes()[:WIDTH]
    ends = np.full(KNOBS, -2.0), np.full(KNOBS, 2.0)
    found = pursue(matrix[:, 0].astype(float), matrix, GROUPS[:WIDTH], ends, np.random.default_rng(0))
    assert found == Pursuit((), (), 0.0, 0.0)
    assert not found.follows


def test_what_acts_on_nothing_is_not_chosen():
    """A dead column has no size to be divided by."""
    matrix = slopes()
    matrix[:, 0] = 0
    assert searched(0.01 * matrix[:, 3].astype(float), matrix).chosen == (3,)
