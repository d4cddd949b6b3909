import math

import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.drift.summary import RELATIVE_ERROR, DriftSummary
from zerodrift.stats.ratios import token_ess

VIEWS = ("mean", "signed_mean", "k1", "k2", "k3", "mean_ratio", "ess")


def test_a_summary_by_hand():
    delta = np.array([0.0, -0.2, 0.1, 2.0, -0.05])
    found = DriftSummary.of(delta)
    assert (found.count, found.zeros, found.max) == (5, 1, 2.0)
    for name, value in {
        "mean": 2.35 / 5,
        "signed_mean": 1.85 / 5,
        "k1": -1.85 / 5,
        "k2": (0.04 + 0.01 + 4.0 + 0.0025) / 10,
        "k3": np.mean(np.exp(delta) - 1 - delta),
        "mean_ratio": np.exp(delta).mean(),
        "ess": token_ess(delta),
    }.items():
        assert getattr(found, name) == pytest.approx(value), name
    assert msgspec.json.decode(msgspec.json.encode(found), type=DriftSummary) == found


@pytest.mark.parametrize("view", VIEWS)
def test_no_tokens_have_no_mean(view):
    with pytest.raises(InvalidValue):
        getattr(DriftSummary(), view)


@pytest.mark.parametrize("level", [-9000.0, -745.0, -400.0, -371.0, -5.0, 299.0])
def test_ess_is_that_of_the_tokens_however_small_the_ratios_are(level):
    """At -371 nats the squares of the ratios are denormal, and at -400 they vanish."""
    delta = level + np.array([0.0, 0.9, -0.4, -1.3])
    found = token_ess(delta)
    assert DriftSummary.of(delta).ess == found
    merged = DriftSummary.of(delta[:2]) + DriftSummary.of(delta[2:])
    assert merged.ess == pytest.approx(found, rel=1e-14)


def test_a_batch_that_vanishes_beside_another_still_counts_its_tokens():
    merged = DriftSummary.of([-9000.0] * 3) + DriftSummary.of([0.0])
    assert (merged.ess, merged.mean_ratio, merged.count) == (0.25, 0.25, 4)
    assert merged == DriftSummary.of([0.0]) + DriftSummary.of([-9000.0] * 3)


def test_zeros_dust_and_overflow_have_bins_of_their_own():
    assert pytest.approx(0.0593, abs=5e-5) == RELATIVE_ERROR
    found = DriftSummary.of([0.0, -0.0, 1e-12, 0.5, 250.0])
    assert [found.bins[0], found.bins[1], found.bins[-1]] == [2, 1, 1]
    assert [found.quantile(q) for q in (0.0, 0.4, 0.6, 1.0)] == [0.0, 0.0, 1e-9, 250.0]
    assert found.quantile(0.8) == pytest.approx(0.5, rel=RELATIVE_ERROR)
    assert DriftSummary.of([100.0]).bins[-1] == 1


@pytest.mark.parametrize("edge", [1e-9, 1e-3, 1.0])
def test_a_value_on_an_edge_belongs_to_the_bin_above(edge):
    assert edge < DriftSummary.of([edge, 10.0]).quantile(0.5) <= edge * (1 + RELATIVE_ERROR) * (1 + 1e-12)


def test_no_quantile_is_beyond_what_was_seen():
    """0.01 lies low in its bin, whose middle is 0.01059."""
    for sizes in ([0.0, 0.0, 0.0, 0.01], [1e-12], [0.3, 0.29]):
        found = DriftSummary.of(sizes)
        assert found.quantile(0.9) <= found.quantile(1.0) <= found.max == max(sizes)


@pytest.mark.parametrize("percent", [1, 7, 29, 57, 58, 99])
def test_a_percentile_of_a_hundred_tokens_is_that_token(percent):
    """In float64, 0.07 · 100 is 7.000000000000001, and its ceiling 8."""
    found = DriftSummary.of([1e-3] * percent + [1.0] * (100 - percent))
    assert found.quantile(percent / 100) == pytest.approx(1e-3, rel=1.01 * RELATIVE_ERROR)
    assert found.quantile(np.float64((percent + 1) / 100)) == pytest.approx(1.0, rel=1.01 * RELATIVE_ERROR)


WHOLE = msgspec.to_builtins(DriftSummary.of([0.5, -1.0]))


@pytest.mark.parametrize(
    "broken",
    [
        {"count": -1},
        {"count": True},
        {"count": 3},
        {"ratio": 0.5},
        {"ratio_squared": 0.5},
        {"ratio": math.inf},
        {"top": math.inf},
        {"delta": math.nan},
        {"squared": -1.0},
        {"max": math.inf},
        {"bins": (1, 2, 3)},
        {"bins": (-1, 3, *WHOLE["bins"][2:])},
    ],
)
def test_summaries_that_no_tokens_have_are_refused(broken):
    assert DriftSummary(**WHOLE).count == 2
    with pytest.raises(InvalidValue):
        DriftSummary(**(WHOLE | broken))


def test_what_cannot_be_summarised_is_refused():
    for q in (-0.1, 1.5, math.nan):
        with pytest.raises(InvalidValue):
            DriftSummary.of([1.0]).quantile(q)
    with pytest.raises(InvalidValue):
        DriftSummary().quantile(0.5)
    with pytest.raises(NonFinite):
        DriftSummary.of([np.inf])
