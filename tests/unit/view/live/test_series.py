"""Columns and history out of lines: what was not observable stays NaN, and a training may go back."""

import math

import numpy as np
import pytest

from zerodrift.monitor.decision import State
from zerodrift.monitor.metrics import MEANINGS
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.steps import line_of
from zerodrift.view.live.series import COLUMNS, MOST_CHANGES, Series, step_of


def observed(monitor, step, rng, nats=0.01, **more):
    behavior = -rng.exponential(1.0, (16, 40)) - 0.5
    old = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
    given = {"behavior_logprobs": behavior, "old_logprobs": old, "versions": 0, "trainer_version": 0, **more}
    return step_of(line_of(monitor.observe(step=step, **given)))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def series_of(*steps):
    series = Series()
    for step in steps:
        series.add(step)
    return series


def test_every_column_is_a_metric():
    assert set(COLUMNS) <= set(MEANINGS)


def test_numbers_are_the_monitors_and_what_was_not_observable_is_nan(rng):
    monitor = Monitor()
    first = observed(monitor, 0, rng)
    stale = observed(monitor, 1, rng, trainer_version=3)
    series = series_of(first, stale)
    assert series.columns["mismatch/mean_abs"][0] == pytest.approx(
        first.metrics["zerodrift/mismatch/mean_abs"], rel=1e-6
    )
    assert math.isnan(series.columns["mismatch/mean_abs"][1])
    assert math.isnan(series.columns["reward/mean"][0])
    assert list(series.steps) == [0, 1]
    assert "mismatch" in series.unseen()
    assert "mismatch" not in series_of(first).unseen()


def test_history_joins_what_is_the_same_and_tells_what_changed(rng):
    monitor = Monitor()
    steps = [observed(monitor, step, rng, nats=0.3 if step in (4, 5) else 0.01) for step in range(8)]
    series = series_of(*steps)
    told = [(each.first, each.last, each.count, each.state, each.before) for each in series.changes]
    assert told == [
        (0, 3, 4, "OK", ""),
        (4, 5, 2, "QUARANTINE", "OK"),
        (6, 7, 2, "WARN", "QUARANTINE"),
    ]
    assert series.kept_back == 2
    assert series.counts == {State.OK: 4, State.WARN: 2, State.QUARANTINE: 2, State.HALT: 0}


def test_a_training_that_goes_back_replaces_the_steps_that_it_makes_again(rng):
    monitor = Monitor()
    series = series_of(*(observed(monitor, step, rng) for step in range(6)))
    monitor.rewind(2)
    series.add(observed(monitor, 3, rng))
    assert list(series.steps) == [0, 1, 2, 3]
    assert {len(column) for column in series.columns.values()} == {4}
    assert series.epoch == 1
    assert series.rewound == [(5, 3)]


def test_an_alert_is_no_step_of_its_own(rng):
    monitor = Monitor()
    series = series_of(observed(monitor, 0, rng), step_of(line_of(monitor.trigger_alert("somebody saw it"))))
    assert list(series.steps) == [0]
    assert series.columns["state"][0] == 2
    assert series.last.state == "QUARANTINE"
    assert len(series.changes) == 2


def test_one_number_per_step_is_shown(rng):
    monitor = Monitor()
    lines = [line_of(monitor.log_step(step, kl_estimate=1e-4, reward_mean=0.5)) for step in range(3)]
    series = series_of(*map(step_of, lines))
    assert list(series.columns["kl_estimate"]) == pytest.approx([1e-4] * 3)
    assert list(series.columns["reward/mean"]) == [0.5] * 3
    assert math.isnan(series.columns["mismatch/k3"][0])


def test_the_history_is_bounded(rng):
    monitor = Monitor()
    good, bad = observed(monitor, 0, rng), observed(monitor, 1, rng, nats=0.3)
    series = Series()
    for step in range(2 * MOST_CHANGES):
        one = bad if step % 2 else good
        one.step = step
        series.add(one)
    assert len(series.changes) == MOST_CHANGES
    assert series.changes[-1].last == 2 * MOST_CHANGES - 1


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"null", b'{"step": 1}', b"\xff\xfe",
        b'{"time":1,"step":-1,"state":"OK","train":true,"metrics":{}}',
        b'{"time":1,"step":99999999999999999999,"state":"OK","train":true,"metrics":{}}',
        b'{"time":1,"step":1,"state":"FINE","train":true,"metrics":{}}',
        b'{"time":1,"step":1,"state":"OK","train":true,"metrics":{"zerodrift/entropy":"x"}}',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_step_is_refused(line):
    with pytest.raises(ValueError):  # noqa: PT011 - the class is all that is promised
        step_of(line)


def test_a_field_of_a_later_version_is_left_alone():
    line = b'{"time":1,"step":1,"state":"OK","train":true,"metrics":{"zerodrift/new":1},"more":{"x":1}}'
    assert step_of(line).step == 1
