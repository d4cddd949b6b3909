import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats.histogram import RELATIVE_ERROR, DeltaHistogram


def test_the_documented_bound() -> None:
    assert pytest.approx(0.0593, abs=5e-5) == RELATIVE_ERROR


def test_zeros_dust_and_overflow_have_bins_of_their_own() -> None:
    found = DeltaHistogram.of([0.0, -0.0, 1e-12, 0.5, 250.0])
    assert (found.zeros, found.total, found.largest) == (2, 5, 250.0)
    assert [found.counts[0], found.counts[1], found.counts[-1]] == [2, 1, 1]
    assert found.quantile(0.0) == 0.0
    assert found.quantile(0.4) == 0.0
    assert found.quantile(0.6) == 1e-9
    assert found.quantile(0.8) == pytest.approx(0.5, rel=RELATIVE_ERROR)
    assert found.quantile(1.0) == 250.0


@pytest.mark.parametrize("edge", [1e-9, 1e-3, 1.0])
def test_a_value_on_an_edge_belongs_to_the_bin_above(edge: float) -> None:
    assert edge < DeltaHistogram.of([edge]).quantile(0.5) <= edge * (1 + RELATIVE_ERROR) * (1 + 1e-12)


def test_the_last_edge_overflows() -> None:
    assert DeltaHistogram.of([100.0]).counts[-1] == 1


def test_a_histogram_survives_json() -> None:
    found = DeltaHistogram.of([0.1, -3.0])
    assert msgspec.json.decode(msgspec.json.encode(found), type=DeltaHistogram) == found


@pytest.mark.parametrize("percent", range(1, 100))
@pytest.mark.parametrize("number", [float, np.float64])
def test_a_percentile_of_a_hundred_tokens_is_that_token(percent: int, number: type[float]) -> None:
    """In float64, 0.07 · 100 is 7.000000000000001, and its ceiling 8."""
    found = DeltaHistogram.of([1e-3] * percent + [1.0] * (100 - percent))
    assert found.quantile(number(percent / 100)) == pytest.approx(1e-3, rel=1.01 * RELATIVE_ERROR)
    assert found.quantile(number((percent + 1) / 100)) == pytest.approx(1.0, rel=1.01 * RELATIVE_ERROR)


def test_no_quantile_of_nothing_and_none_outside_the_unit_interval() -> None:
    with pytest.raises(InvalidValue, match="empty"):
        DeltaHistogram().quantile(0.5)
    with pytest.raises(InvalidValue, match=r"q is 1\.5"):
        DeltaHistogram.of([1.0]).quantile(1.5)


def test_histograms_that_cannot_exist_are_refused() -> None:
    with pytest.raises(InvalidValue, match="a histogram of 3 bins"):
        DeltaHistogram((1, 2, 3))
    with pytest.raises(InvalidValue, match="smallest count is -1"):
        DeltaHistogram((-1, *DeltaHistogram().counts[1:]))
    with pytest.raises(InvalidValue, match="largest"):
        DeltaHistogram(largest=float("inf"))
    with pytest.raises(NonFinite):
        DeltaHistogram.of([np.inf])
