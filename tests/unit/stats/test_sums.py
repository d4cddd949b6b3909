import math

import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, NonFinite
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


def test_ratios_that_vanish_have_no_ess() -> None:
    with pytest.raises(NonFinite, match="vanish"):
        _ = DriftSums.of([-400.0, -500.0]).ess


@pytest.mark.parametrize(
    "broken",
    [{"count": -1}, {"count": True}, {"delta": math.nan}, {"squared": -1.0}, {"ratio": math.inf}],
)
def test_sums_that_no_tokens_have_are_refused(broken: dict[str, float]) -> None:
    with pytest.raises(InvalidValue):
        DriftSums(**broken)  # type: ignore[arg-type]
