import math

import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.ratios import token_ess
from zerodrift.stats.summary import summarise
from zerodrift.stats.sums import DriftSums


def test_views_of_sums_are_those_of_the_tokens() -> None:
    delta = np.random.default_rng(1).normal(size=1000) * 0.3
    sums, summary = DriftSums.of(delta), summarise(delta)
    assert sums.count == summary.count
    assert sums.mean == pytest.approx(summary.mean)
    assert sums.signed_mean == pytest.approx(summary.signed_mean)
    assert sums.rms == pytest.approx(summary.rms)
    assert sums.mean_k3 == pytest.approx(summary.k3)
    assert sums.mean_ratio == pytest.approx(np.exp(delta).mean())
    assert sums.ess == pytest.approx(token_ess(delta))


def test_sums_survive_json() -> None:
    sums = DriftSums.of([0.5, -1.0])
    assert msgspec.json.decode(msgspec.json.encode(sums), type=DriftSums) == sums


@pytest.mark.parametrize("view", ["mean", "signed_mean", "rms", "mean_k3", "mean_ratio", "ess"])
def test_no_tokens_have_no_mean(view: str) -> None:
    with pytest.raises(InvalidValue, match="no tokens"):
        getattr(DriftSums(), view)


@pytest.mark.parametrize("level", [-9000.0, -745.0, -400.0, -371.0, -5.0, 299.0])
def test_ess_is_that_of_the_tokens_however_small_the_ratios_are(level: float) -> None:
    """At -371 nats the squares of the ratios are denormal, and at -400 they vanish."""
    delta = level + np.array([0.0, 0.9, -0.4, -1.3])
    found = token_ess(delta)
    assert DriftSums.of(delta).ess == found
    assert (DriftSums.of(delta[:2]) + DriftSums.of(delta[2:])).ess == pytest.approx(found, rel=1e-14)
    assert found == pytest.approx(token_ess(delta - level), rel=1e-10)


def test_a_batch_that_vanishes_beside_another_still_counts_its_tokens() -> None:
    merged = DriftSums.of([-9000.0] * 3) + DriftSums.of([0.0])
    assert merged.ess == 0.25
    assert merged.mean_ratio == 0.25
    assert merged == DriftSums.of([0.0]) + DriftSums.of([-9000.0] * 3)


@pytest.mark.parametrize(
    "broken",
    [
        {"count": 1, "ratio": 1.0},
        {"count": 1, "ratio_squared": 1.0},
        {"largest": math.inf},
        {"count": -1},
        {"count": True},
        {"delta": math.nan},
        {"squared": -1.0},
        {"ratio": math.inf},
    ],
)
def test_sums_that_no_tokens_have_are_refused(broken: dict[str, float]) -> None:
    with pytest.raises(InvalidValue):
        DriftSums(**broken)  # type: ignore[arg-type]
