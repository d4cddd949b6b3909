"""Names and numbers that dashboards get."""

import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from zerodrift.integrations.metrics import LEVELS, MEANINGS, PREFIX, Window, metrics_of
from zerodrift.integrations.trl import OWN, TRL_NAMES
from zerodrift.monitor.correction import truncated
from zerodrift.monitor.decision import Measured, State
from zerodrift.monitor.monitor import Monitor

ROOT = Path(__file__).parents[3]


def observed(nats=0.01, batches=1, **settings):
    rng = np.random.default_rng(0)
    monitor = Monitor(**settings)
    for _ in range(batches):
        behavior = -rng.exponential(1.0, (16, 40)) - 0.5
        old = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
        decision = monitor.observe(
            behavior_logprobs=behavior,
            old_logprobs=old,
            current_logprobs=old,
            rescored_logprobs=old.copy(),
            versions=np.repeat([0, 1], 8),
            trainer_version=1,
            rewards=rng.random(16),
            reference_kl=0.5,
        )
    return decision


def test_every_number_that_is_there_has_its_name_and_nothing_else_is_named():
    found = metrics_of(observed(batches=12, correction=truncated(2.0)))
    found |= metrics_of(Monitor().log_step(0, kl_estimate=1e-4))
    assert set(found) == {PREFIX + name for name in MEANINGS}
    assert all(math.isfinite(value) for value in found.values())


def test_the_numbers_are_the_decisions():
    decision = observed(nats=0.2)
    found = metrics_of(decision)
    assert isinstance(decision.mismatch, Measured)
    assert found["zerodrift/state"] == 2 == LEVELS[State.QUARANTINE]
    assert found["zerodrift/kept_back"] == 1
    assert found["zerodrift/mismatch/mean_abs"] == decision.mismatch.mean_abs > 0.1
    assert found["zerodrift/mismatch/clip_rate"] == decision.mismatch.clip_rate


def test_what_could_not_be_measured_is_left_out_and_never_0():
    found = metrics_of(Monitor().log_step(0, kl_estimate=1e-4))
    assert found["zerodrift/mismatch/observable"] == 0
    assert "zerodrift/mismatch/mean_abs" not in found
    assert "zerodrift/entropy" not in found


def test_what_is_not_finite_is_left_out():
    decision = msgspec.structs.replace(observed(), entropy=math.nan, reference_kl=math.inf)
    assert not {"zerodrift/entropy", "zerodrift/reference_kl"} & set(metrics_of(decision))


def test_a_window_has_the_worst_state_and_the_mean_of_the_rest():
    window = Window()
    for state, largest, mean in ((0, 0.5, 0.1), (3, 0.2, 0.3), (1, 0.1, 0.2)):
        window.add(
            {"zerodrift/state": state, "zerodrift/total/max": largest, "zerodrift/total/mean_abs": mean}
        )
    assert window.take() == {
        "zerodrift/state": 3,
        "zerodrift/total/max": 0.5,
        "zerodrift/total/mean_abs": pytest.approx(0.2),
    }
    assert window.take() == {}


def test_the_page_lists_every_name_that_a_training_logs():
    listed = set(re.findall(r"`((?:zerodrift|sampling)/[a-z0-9_/]+)`", (ROOT / "docs/trl.md").read_text()))
    assert listed == {PREFIX + name for name in {**MEANINGS, **OWN}} | set(TRL_NAMES)
