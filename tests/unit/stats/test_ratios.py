import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats import ratios
from zerodrift.stats.ratios import ClipFraction

IDS = [0, 0, 1]


def test_ess_by_hand():
    # Ratios 1 and 3: (1 + 3)² / (2 · (1 + 9)).
    assert ratios.token_ess(np.log([1.0, 3.0])) == pytest.approx(0.8)


def test_one_token_that_outweighs_the_rest_leaves_one_sample_however_large_it_is():
    r = np.zeros(100)
    r[3] = 300.0
    assert ratios.token_ess(r) == pytest.approx(0.01)


def test_sequence_ess_weighs_sequences_by_their_products():
    r = np.log([3.0, 1.0, 1.0])
    assert ratios.sequence_ess(r, IDS) == pytest.approx(0.8)
    assert ratios.sequence_ess(np.tile([250.0, 0.0], 10), [0, 1] * 10) == pytest.approx(0.5)


def test_clip_fraction_counts_each_side():
    r = np.log([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.3, 2.0, 3.0])
    found = ratios.clip_fraction(r, low=0.2, high=0.28)
    assert found == ClipFraction(0.2, 0.3)
    assert found.total == pytest.approx(0.5)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (1.0, 0.2), (0.2, -0.1), (0.2, float("nan"))])
def test_bounds_that_could_not_clip_are_refused(low, high):
    with pytest.raises(InvalidValue, match=r"^(low|high) is"):
        ratios.clip_fraction([0.0], low=low, high=high)


def test_a_nan_is_refused_everywhere():
    with pytest.raises(NonFinite):
        ratios.token_ess([np.nan])
    with pytest.raises(NonFinite):
        ratios.sequence_ess([np.nan], [0])
