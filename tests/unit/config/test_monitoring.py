import pytest

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core.errors import InvalidValue


def test_defaults_are_the_published_ones() -> None:
    monitoring = MonitoringConfig()
    assert monitoring.check_interval_steps == 50
    assert monitoring.reward_baseline_window == 1000
    assert monitoring.consecutive_windows == 3
    assert monitoring.circuit_breaker_enabled
    assert MonitoringConfig(kl_threshold=0.01).kl_threshold == 0.01


@pytest.mark.parametrize(
    "bad",
    [
        {"kl_threshold": 0.0},
        {"kl_threshold": -1.0},
        {"kl_threshold": float("nan")},
        {"check_interval_steps": 0},
        {"reward_baseline_window": 0},
        {"consecutive_windows": 0},
    ],
)
def test_a_monitor_that_cannot_work_is_refused(bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(InvalidValue, match=name):
        MonitoringConfig(**bad)  # type: ignore[arg-type]
