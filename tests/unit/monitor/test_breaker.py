"""The way up and the way back, one window after the other."""

import json

import numpy as np
import pytest

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core.errors import InvalidValue, RecordError, SchemaMismatch
from zerodrift.monitor.actions import Actions
from zerodrift.monitor.breaker import Breaker
from zerodrift.monitor.decision import Code, State
from zerodrift.monitor.monitor import Monitor

OK, WARN, QUARANTINE, HALT = State.OK, State.WARN, State.QUARANTINE, State.HALT
HEALTHY, BAD = 1e-4, 0.5


def states(pattern: str, windows: int = 3) -> list[State]:
    """`b` is a bad window, `w` one that warns, `.` a good one, `u` one that nobody could measure, `h` half-opens by hand."""
    breaker, found = Breaker(), []
    for each in pattern:
        breaker = (
            breaker.half_open()
            if each == "h"
            else breaker.update(bad=each == "b", warned=each in "wu", windows=windows, measured=each != "u")
        )
        found.append(breaker.state)
    return found


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("..w.", [OK, OK, WARN, OK]),
        ("b...", [QUARANTINE, WARN, WARN, OK]),
        ("bbb.", [QUARANTINE, QUARANTINE, HALT, HALT]),
        ("bb.b.", [QUARANTINE, QUARANTINE, WARN, QUARANTINE, WARN]),
        ("bbb...", [QUARANTINE, QUARANTINE, HALT, HALT, HALT, HALT]),
        ("bbbh...", [QUARANTINE, QUARANTINE, HALT, WARN, WARN, WARN, OK]),
        ("bbbhuuuuu...", [QUARANTINE, QUARANTINE, HALT, *[WARN] * 8, OK]),
        ("bbbhub", [QUARANTINE, QUARANTINE, HALT, WARN, WARN, HALT]),
        ("buuu.u.u.", [QUARANTINE, *[WARN] * 7, OK]),
        ("bubub", [QUARANTINE, WARN, QUARANTINE, WARN, HALT]),
        ("uu.", [WARN, WARN, OK]),
        ("bbbh.b", [QUARANTINE, QUARANTINE, HALT, WARN, WARN, HALT]),
    ],
)
def test_windows(pattern, expected):
    assert states(pattern) == expected


def test_batches_that_nobody_could_measure_close_nothing():
    logprobs = np.full((8, 30), -1.0)
    fresh = {"behavior_logprobs": logprobs, "old_logprobs": logprobs.copy(), "trainer_version": 3}
    monitor = Monitor()
    for _ in range(3):
        monitor.trigger_alert()
    monitor.half_open()
    assert [monitor.observe(**fresh, versions=2).state for _ in range(5)] == [WARN] * 5
    assert [monitor.observe(**fresh, versions=3).state for _ in range(3)] == [WARN, WARN, OK]


def test_how_many_in_a_row_is_the_users():
    assert states("b", windows=1) == [HALT]
    assert states("bbbb", windows=5) == [QUARANTINE] * 4


def run(monitor: Monitor, values) -> list[State]:
    start = 0 if monitor.remembered.step is None else monitor.remembered.step + 1
    return [monitor.log_step(step, value, 0.5).state for step, value in enumerate(values, start)]


def test_one_line_per_step():
    monitor = Monitor()
    assert run(monitor, [HEALTHY] * 30) == [OK] * 30
    assert run(monitor, [BAD, BAD, BAD]) == [QUARANTINE, QUARANTINE, HALT]


def test_a_kl_that_creeps_up_below_the_gate_is_seen_and_one_that_does_not_is_not():
    rng = np.random.default_rng(0)
    noise = 6e-4 * np.exp(rng.normal(0, 0.05, 400))
    assert set(run(Monitor(), noise[:300])) == {OK}
    ramp = noise[300:] * np.linspace(1, 3, 100)
    monitor = Monitor()
    run(monitor, noise[:300])
    assert run(monitor, ramp).index(QUARANTINE) < 30


def test_the_distance_to_a_reference_is_recorded_and_never_trips():
    monitor = Monitor()
    for step in range(40):
        decision = monitor.log_step(step, HEALTHY, 0.5, reference_kl=float(step**2))
        assert (decision.state, decision.reference_kl) == (OK, step**2)


@pytest.mark.parametrize(("kl", "reward"), [(float("nan"), 0.5), (HEALTHY, float("inf"))])
def test_a_number_that_is_none_trips(kl, reward):
    decision = Monitor().log_step(0, kl, reward)
    assert decision.state is QUARANTINE
    assert decision.reasons[0].code is Code.NOT_FINITE


def test_state_survives_a_restart(tmp_path):
    path = tmp_path / "monitor.json"
    run(Monitor(path=path), [HEALTHY] * 30 + [BAD] * 2)
    again = Monitor(path=path)
    assert again.state is QUARANTINE
    assert run(again, [BAD, HEALTHY]) == [HALT, HALT]
    assert Monitor(path=path).state is HALT
    again.half_open()
    assert run(Monitor(path=path), [HEALTHY] * 4) == [WARN, WARN, OK, OK]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_state_that_cannot_be_read_is_no_fresh_start(tmp_path):
    path = tmp_path / "monitor.json"
    path.write_text('{"schema": "zerodrift.monitor/1", "brea')
    with pytest.raises(RecordError):
        Monitor(path=path)
    path.write_text(json.dumps({"schema": "zerodrift.monitor/0"}))
    with pytest.raises(SchemaMismatch):
        Monitor(path=path)


def test_a_process_that_starts_in_a_halt_pauses_and_stops_once_more(tmp_path):
    path, called = tmp_path / "monitor.json", []
    actions = Actions(
        pause_engine=lambda decision: called.append(("pause", decision.step)),
        stop_trainer=lambda decision: called.append(("stop", decision.step)),
    )
    run(Monitor(path=path, actions=actions), [BAD] * 3)
    assert called == [("pause", 2), ("stop", 2)]
    again = Monitor(path=path, actions=actions)
    run(again, [HEALTHY] * 3)
    assert called[2:] == [("pause", 3), ("stop", 3)]
    restored = Monitor(actions=actions)
    restored.restore(again.remembered)
    run(restored, [HEALTHY])
    assert called[4:] == [("pause", 6), ("stop", 6)]
    again.restore(again.remembered)
    run(again, [HEALTHY])
    assert called[6:] == []


def test_actions_run_once_when_it_halts_and_for_every_bad_batch():
    called = []
    actions = Actions(
        quarantine=lambda decision: called.append(("quarantine", decision.step)),
        pause_engine=lambda decision: called.append(("pause", decision.step)),
        stop_trainer=lambda decision: called.append(("stop", decision.step)),
    )
    run(Monitor(actions=actions), [HEALTHY, BAD, BAD, BAD, BAD])
    bad = [("quarantine", 1), ("quarantine", 2), ("quarantine", 3)]
    assert called == [*bad, ("pause", 3), ("stop", 3), ("quarantine", 4)]


def test_a_fall_back_leaves_the_breaker_half_open_and_one_that_fails_does_not():
    used = []
    monitor = Monitor(actions=Actions(fall_back=used.append, known_good="vllm-v0"))
    assert run(monitor, [BAD] * 3) == [QUARANTINE, QUARANTINE, HALT]
    assert (used, monitor.state) == (["vllm-v0"], WARN)
    assert run(monitor, [HEALTHY] * 3) == [WARN, WARN, OK]

    def fails(name):
        raise OSError(name)

    stopped = []
    monitor = Monitor(
        actions=Actions(pause_engine=fails, stop_trainer=stopped.append, fall_back=fails, known_good="x")
    )
    decisions = [monitor.log_step(step, BAD) for step in range(3)]
    failed = [reason.where for reason in decisions[-1].reasons if reason.code is Code.ACTION_FAILED]
    assert (failed, len(stopped), monitor.state) == (["pause_engine", "fall_back"], 1, HALT)


def test_a_fall_back_needs_a_name():
    with pytest.raises(InvalidValue):
        Actions(fall_back=print)


def test_without_the_breaker_it_only_warns():
    monitor = Monitor(MonitoringConfig(circuit_breaker_enabled=False))
    decisions = [monitor.log_step(step, BAD) for step in range(3)]
    assert [each.state for each in decisions] == [WARN] * 3
    assert decisions[-1].would_be is HALT


def test_an_alert_by_hand_is_a_bad_window():
    monitor = Monitor()
    assert [monitor.trigger_alert().state for _ in range(3)] == [QUARANTINE, QUARANTINE, HALT]
    assert monitor.remembered.bad == 3


def test_an_action_that_opens_the_breaker_again_is_called_at_the_next_halt():
    called = []

    def stop(decision):
        called.append(decision.step)
        monitor.half_open()

    monitor = Monitor(actions=Actions(stop_trainer=stop))
    rng = np.random.default_rng(0)
    behavior = -rng.exponential(1.0, (16, 40)) - 0.5
    for _ in range(4):
        monitor.observe(
            behavior_logprobs=behavior, old_logprobs=behavior - 0.5, versions=0, trainer_version=0
        )
    assert called == [2, 3]
