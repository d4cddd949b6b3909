"""Summaries of disjoint batches: merging is the union, in any order and any grouping."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zerodrift.drift.summary import RELATIVE_ERROR, DriftSummary
from zerodrift.stats.ratios import token_ess

steady = settings(deadline=None, max_examples=60)
deltas = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-20, 20))
extremes = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-9990, 300))
sizes = st.one_of(st.just(0.0), st.floats(-8.9, 1.9).map(lambda exponent: 10.0**exponent))


def close(first: DriftSummary, second: DriftSummary) -> bool:
    """Counts exactly, sums up to rounding."""
    return first.bins == second.bins and all(
        math.isclose(getattr(first, name), getattr(second, name), rel_tol=1e-12, abs_tol=1e-12)
        for name in DriftSummary.__struct_fields__[:-1]
    )


@steady
@given(deltas, deltas, deltas)
def test_summaries_are_a_commutative_monoid(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    first, second, third = DriftSummary.of(a), DriftSummary.of(b), DriftSummary.of(c)
    assert first + second == second + first
    assert close((first + second) + third, first + (second + third))
    assert first + DriftSummary() == first
    assert close(first + second, DriftSummary.of(np.concatenate((a, b))))


@steady
@given(extremes, extremes)
def test_ess_of_merged_summaries_is_that_of_all_tokens(a: np.ndarray, b: np.ndarray) -> None:
    merged = DriftSummary.of(a) + DriftSummary.of(b)
    assert math.isclose(merged.ess, token_ess(np.concatenate((a, b))), rel_tol=1e-12)


@steady
@given(deltas)
def test_a_summary_keeps_the_order_of_its_parts(delta: np.ndarray) -> None:
    found, flipped = DriftSummary.of(delta), DriftSummary.of(-delta)
    assert abs(found.signed_mean) <= found.mean * (1 + 1e-12)
    assert found.mean <= math.sqrt(2 * found.k2) * (1 + 1e-12) + 1e-150
    assert found.mean <= found.max * (1 + 1e-12) + 1e-150
    assert 0 < found.ess <= 1
    assert (found.max, found.bins) == (flipped.max, flipped.bins)
    assert found.k1 == -flipped.k1


@settings(deadline=None, max_examples=200)
@given(st.lists(sizes, min_size=1, max_size=100), st.integers(0, 1000))
def test_a_quantile_is_the_order_statistic_within_its_bound(values: list[float], thousandths: int) -> None:
    # The rank in integers alone: in float64, 0.07 · 100 is a hair above 7.
    rank = max(1, -(-thousandths * len(values) // 1000))
    exact = sorted(values)[rank - 1]
    found = DriftSummary.of(values).quantile(thousandths / 1000)
    assert abs(found - exact) <= RELATIVE_ERROR * exact * (1 + 1e-9)


@steady
@given(st.lists(sizes, min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise(values: list[float], q: float, other: float) -> None:
    summary = DriftSummary.of(values)
    assert summary.quantile(min(q, other)) <= summary.quantile(max(q, other))
