"""Means of whole runs: how often equal kinds of runs are called different, and how often a difference of a stated size is seen."""

import math

import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.run_means import began, detectable, holm, least_rank_p, summary_of_runs
from zerodrift.stats.summaries import mean_shift


def p_values(first, second):
    return [
        mean_shift(summary_of_runs(ours), summary_of_runs(theirs)).p_value
        for ours, theirs in zip(first, second, strict=True)
    ]


@pytest.mark.parametrize("draw", ["normal", "uniform", "exponential"])
def test_equal_kinds_of_three_runs_are_called_different_as_rarely_as_said(draw):
    rng = np.random.default_rng(0)
    found = np.array(p_values(getattr(rng, draw)(size=(4000, 3)), getattr(rng, draw)(size=(4000, 3))))
    # 0.05 and three standard errors of 4,000 draws.
    assert (found <= 0.05).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)


@pytest.mark.parametrize(("runs", "level"), [(3, 0.05), (3, 0.003), (5, 0.003)])
def test_a_difference_of_the_stated_size_is_seen_19_times_in_20(runs, level):
    rng = np.random.default_rng(1)
    size = detectable(1.0, runs, runs, level)
    found = p_values(rng.normal(size=(2000, runs)), rng.normal(size, size=(2000, runs)))
    assert (np.array(found) <= level).mean() >= 0.94


def test_what_permuting_runs_could_show_at_best():
    assert [least_rank_p(n, n) for n in (3, 4, 5)] == pytest.approx([0.1, 2 / 70, 2 / 252])
    assert least_rank_p(1, 1) == 1
    assert least_rank_p(2, 3) == pytest.approx(0.1)


def test_adjusted_for_their_number():
    """Holm's own: the least times 3, the next times 2, never falling, in the order that was given, and at most 1."""
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("series", "step"),
    [([0, 0, 1, 1, 1], 2), ([1, 1, 1], 0), ([0, 0, 0, -2], 3), ([0, 0, 0], 0), ([5, 4, 3, 2], 0)],
)
def test_since_when_a_level_is_another(series, step):
    assert began(series) == step


def test_a_noisy_series_is_dated_within_a_step_or_two():
    rng = np.random.default_rng(2)
    found = [began([*rng.normal(size=10), *rng.normal(3, size=10)]) for _ in range(500)]
    assert np.mean(np.abs(np.array(found) - 10) <= 1) >= 0.9


def test_one_run_has_no_spread():
    with pytest.raises(InvalidValue, match="1 runs have no spread"):
        summary_of_runs([0.5])
    with pytest.raises(InvalidValue, match="begins nowhere"):
        began([])
