import numpy as np
import pytest
from scipy import stats

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.summaries import Summary, mean_shift, merged


def of(values: np.ndarray) -> Summary:
    return Summary(float(values.mean()), float(values.std(ddof=1)), len(values))


def test_with_equal_sizes_it_is_students_test():
    rng = np.random.default_rng(0)
    now, then = rng.normal(0.3, 1, 50), rng.normal(0, 2, 50)
    shift, expected = mean_shift(of(now), of(then)), stats.ttest_ind(now, then)
    interval = expected.confidence_interval(0.95)
    assert shift.p_value == pytest.approx(expected.pvalue)
    assert (shift.low, shift.high) == pytest.approx((interval.low, interval.high))
    assert shift.difference == pytest.approx(now.mean() - then.mean())


def test_a_larger_sample_counts_as_the_smaller():
    few, many = Summary(0.5, 1.0, 20), Summary(0.0, 1.0, 2000)
    width = mean_shift(few, many).high - mean_shift(few, many).low
    assert width == pytest.approx(2 * 1.96 * (2 / 20) ** 0.5, rel=1e-3)
    assert mean_shift(few, many).p_value == pytest.approx(mean_shift(many, few).p_value)


def test_equal_values_without_spread():
    same, other = Summary(1.0, 0.0, 30), Summary(0.0, 0.0, 30)
    assert mean_shift(same, same)[:4] == (0.0, 0.0, 0.0, 1.0)
    assert mean_shift(same, other).p_value == 0.0
    assert mean_shift(other, other).p_value == 1.0


def test_rounding_is_no_shift():
    tenths = merged([of(np.full(n, 0.1)) for n in (33, 7, 100)])
    shift = mean_shift(tenths, Summary(0.1, 0.0, 30))
    assert (shift.difference, shift.spread, shift.p_value) == (0.0, 0.0, 1.0)


def test_merged_runs_have_the_moments_of_all_values_and_the_size_of_the_largest():
    rng = np.random.default_rng(1)
    runs = [rng.normal(shift, 1, n) for shift, n in ((0, 20), (1, 50), (5, 30))]
    together, whole = merged([of(run) for run in runs]), np.concatenate(runs)
    assert together.mean == pytest.approx(whole.mean())
    assert together.std == pytest.approx(whole.std(ddof=1))
    assert together.n == 50


def test_nothing_cannot_be_merged():
    with pytest.raises(InvalidValue, match="no sample to merge"):
        merged([])


@pytest.mark.parametrize("n", [(20, 20), (20, 200), (200, 20), (100, 100)])
@pytest.mark.parametrize("solved", [0.5, 0.95])
def test_healthy_pairs_differ_no_oftener_than_the_level(n, solved):
    """Of rewards of 0 and 1, the worst kind: at a level of 1 %, 2,000 pairs."""
    rng = np.random.default_rng(2)
    pairs = [[rng.random(size) < solved for size in n] for _ in range(2000)]
    low = sum(mean_shift(of(now), of(then)).p_value < 0.01 for now, then in pairs)
    assert low <= 40, "20 are expected, and 40 are more than four standard deviations above"


def test_a_shift_is_seen():
    rng = np.random.default_rng(3)
    now, then = rng.random(100) < 0.6, rng.random(100) < 0.95
    assert mean_shift(of(now), of(then)).p_value < 1e-4
