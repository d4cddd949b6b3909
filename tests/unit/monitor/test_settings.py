"""Every key of `monitoring:` changes what the monitor does; one that nobody tests fails here."""

import msgspec
import numpy as np
import pytest

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.decision import Code, State
from zerodrift.monitor.monitor import Monitor

RNG = np.random.default_rng(3)
BEHAVIOR = -RNG.exponential(1.0, (64, 20)) - 0.5
SMALL = BEHAVIOR + RNG.normal(0, 0.01, BEHAVIOR.shape)
WIDE = BEHAVIOR + np.clip(RNG.normal(0, 0.5, BEHAVIOR.shape), -0.4, 0.4)


def decisions(config, count=1, **given):
    monitor = Monitor(config)
    common = {
        "behavior_logprobs": BEHAVIOR,
        "old_logprobs": SMALL,
        "versions": 1,
        "trainer_version": 1,
        **given,
    }
    return [monitor.observe(**common) for _ in range(count)]


def by_kl_threshold(config):
    return [decision.train for decision in decisions(config)]


def by_check_interval_steps(config):
    return [decision.probe_due for decision in decisions(config, 3)]


def by_reward_baseline_window(config):
    return [decision.rewards.baseline_count for decision in decisions(config, 3, rewards=[1.0] * 64)]


def by_circuit_breaker_enabled(config):
    return [decision.state for decision in decisions(config, old_logprobs=WIDE)]


def by_consecutive_windows(config):
    return [decision.state for decision in decisions(config, 3, old_logprobs=WIDE)]


def by_clip_epsilon(config):
    return [decision.mismatch.clip_rate for decision in decisions(config)]


def by_least_ess(config):
    return [[reason.code for reason in decision.reasons] for decision in decisions(config)]


def by_max_lag(config):
    return [decision.train for decision in decisions(config, versions=0, trainer_version=3)]


EFFECTS = {
    "kl_threshold": (by_kl_threshold, 1e-6, [True], [False]),
    "check_interval_steps": (by_check_interval_steps, 2, [False] * 3, [False, True, False]),
    "reward_baseline_window": (by_reward_baseline_window, 70, [0, 64, 128], [0, 64, 70]),
    "circuit_breaker_enabled": (by_circuit_breaker_enabled, False, [State.QUARANTINE], [State.WARN]),
    "consecutive_windows": (
        by_consecutive_windows,
        2,
        [State.QUARANTINE, State.QUARANTINE, State.HALT],
        [State.QUARANTINE, State.HALT, State.HALT],
    ),
    "clip_epsilon": (by_clip_epsilon, 0.011, None, None),
    "least_ess": (by_least_ess, 0.99999, [[]], [[Code.ESS]]),
    "max_lag": (by_max_lag, 2, [True], [False]),
}


@pytest.mark.parametrize("name", MonitoringConfig.__struct_fields__)
def test_every_key_does_something(name):
    assert name in EFFECTS, f"{name} is read nowhere, or nobody has tested that it is"
    effect, value, default, changed = EFFECTS[name]
    before, after = effect(MonitoringConfig()), effect(MonitoringConfig(**{name: value}))
    assert before != after
    if default is not None:
        assert (before, after) == (default, changed)


def test_a_threshold_moves_both_gates_together():
    default, wide = Monitor(), Monitor(MonitoringConfig(kl_threshold=8e-3))
    assert wide.gate.k3 == 8e-3
    assert wide.gate.mean_abs / default.gate.mean_abs == pytest.approx(2.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"clip_epsilon": 0.0},
        {"clip_epsilon": 1.0},
        {"least_ess": 1.5},
        {"max_lag": -1},
        {"consecutive_windows": 0},
    ],
)
def test_settings_that_mean_nothing_are_refused(bad):
    with pytest.raises(InvalidValue):
        MonitoringConfig(**bad)


def test_precision_picks_the_gates():
    assert Monitor(precision="fp32").gate.k3 < Monitor().gate.k3 < Monitor(precision="fp8").gate.k3
    with pytest.raises(ValueError, match="int4"):
        Monitor(precision="int4")


def test_decisions_are_records():
    (decision,) = decisions(MonitoringConfig(), rewards=[0.0, 1.0] * 32)
    assert msgspec.json.decode(msgspec.json.encode(decision), type=type(decision)) == decision
