"""Sums and histograms of disjoint batches: merging is the union, in any order and any grouping."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zerodrift.stats.histogram import RELATIVE_ERROR, DeltaHistogram
from zerodrift.stats.ratios import token_ess
from zerodrift.stats.summary import summarise
from zerodrift.stats.sums import DriftSums

steady = settings(deadline=None, max_examples=60)
deltas = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-20, 20))
extremes = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-9990, 300))
sizes = st.one_of(st.just(0.0), st.floats(-8.9, 1.9).map(lambda exponent: 10.0**exponent))


def close(first: DriftSums, second: DriftSums) -> bool:
    return all(
        math.isclose(getattr(first, name), getattr(second, name), rel_tol=1e-12, abs_tol=1e-12)
        for name in DriftSums.__struct_fields__
    )


@steady
@given(deltas, deltas, deltas)
def test_drift_sums_are_a_commutative_monoid(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    first, second, third = DriftSums.of(a), DriftSums.of(b), DriftSums.of(c)
    assert first + second == second + first
    assert close((first + second) + third, first + (second + third))
    assert first + DriftSums() == first
    assert close(first + second, DriftSums.of(np.concatenate((a, b))))


@steady
@given(deltas)
def test_drift_sums_view_what_the_tokens_say(delta: np.ndarray) -> None:
    sums, summary = DriftSums.of(delta), summarise(delta)
    for mine, theirs in ((sums.mean, summary.mean), (sums.rms, summary.rms), (sums.mean_k3, summary.k3)):
        assert math.isclose(mine, theirs, rel_tol=1e-12, abs_tol=1e-300)
    assert 0 < sums.ess <= 1
    assert math.isclose(sums.ess, token_ess(delta), rel_tol=1e-9)


@steady
@given(extremes, extremes)
def test_ess_of_merged_sums_is_that_of_all_tokens(a: np.ndarray, b: np.ndarray) -> None:
    merged = DriftSums.of(a) + DriftSums.of(b)
    assert math.isclose(merged.ess, token_ess(np.concatenate((a, b))), rel_tol=1e-12)


@steady
@given(deltas)
def test_a_summary_keeps_the_order_of_its_parts(delta: np.ndarray) -> None:
    found, flipped = summarise(delta), summarise(-delta)
    assert found.p50 <= found.p90 <= found.p99 <= found.max
    assert abs(found.signed_mean) <= found.mean * (1 + 1e-12)
    assert found.mean <= found.rms * (1 + 1e-12) + 1e-150
    assert found.rms <= found.max * (1 + 1e-12) + 1e-150
    assert 0 <= found.above_one <= found.above_tenth <= 1
    assert (found.mean, found.p90, found.max) == (flipped.mean, flipped.p90, flipped.max)
    assert found.signed_mean == -flipped.signed_mean


@steady
@given(deltas, deltas, deltas)
def test_histograms_are_a_commutative_monoid_exactly(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    first, second, third = DeltaHistogram.of(a), DeltaHistogram.of(b), DeltaHistogram.of(c)
    assert first + second == second + first
    assert (first + second) + third == first + (second + third)
    assert first + DeltaHistogram() == first
    assert first + second == DeltaHistogram.of(np.concatenate((a, b)))


@settings(deadline=None, max_examples=200)
@given(st.lists(sizes, min_size=1, max_size=100), st.integers(0, 1000))
def test_a_histogram_quantile_is_the_order_statistic_within_its_bound(
    values: list[float], thousandths: int
) -> None:
    # The rank in integers alone: in float64, 0.07 · 100 is a hair above 7.
    rank = max(1, -(-thousandths * len(values) // 1000))
    exact = sorted(values)[rank - 1]
    found = DeltaHistogram.of(values).quantile(thousandths / 1000)
    assert abs(found - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9)


@steady
@given(st.lists(sizes, min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_histogram_quantiles_rise(values: list[float], q: float, other: float) -> None:
    histogram = DeltaHistogram.of(values)
    assert histogram.quantile(min(q, other)) <= histogram.quantile(max(q, other))
