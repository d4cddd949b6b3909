import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats.summary import DeltaSummary, summarise


def test_a_summary_by_hand() -> None:
    found = summarise([0.0, -0.2, 0.1, 2.0, -0.05])
    assert found.count == 5
    assert found.mean == pytest.approx(2.35 / 5)
    assert found.signed_mean == pytest.approx(1.85 / 5)
    assert found.rms == pytest.approx(np.sqrt((0.04 + 0.01 + 4.0 + 0.0025) / 5))
    assert found.p50 == pytest.approx(0.1)
    assert found.p90 == pytest.approx(0.2 + 0.6 * 1.8)
    assert found.p99 == pytest.approx(0.2 + 0.96 * 1.8)
    assert found.max == 2.0
    assert found.k3 == pytest.approx(
        np.mean(np.exp([0, -0.2, 0.1, 2, -0.05]) - 1 - np.array([0, -0.2, 0.1, 2, -0.05]))
    )
    assert found.above_tenth == pytest.approx(0.4)
    assert found.above_one == pytest.approx(0.2)


def test_a_summary_is_a_frozen_record_that_survives_json() -> None:
    found = summarise([0.1, -0.3])
    assert msgspec.json.decode(msgspec.json.encode(found), type=DeltaSummary) == found
    with pytest.raises(AttributeError):
        found.mean = 0.0  # type: ignore[misc]


def test_no_tokens_and_nan_are_refused() -> None:
    with pytest.raises(InvalidValue, match="empty"):
        summarise([])
    with pytest.raises(NonFinite):
        summarise([0.0, np.nan])
