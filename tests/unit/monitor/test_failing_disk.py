"""Writing fails: what was decided is acted on all the same, and the error has a name. And a monitor that was closed."""

import numpy as np
import pytest

from zerodrift.core.errors import ArchiveFull, InvalidValue, RecordError
from zerodrift.monitor import state as states
from zerodrift.monitor.actions import Actions
from zerodrift.monitor.decision import State
from zerodrift.monitor.directory import STEPS
from zerodrift.monitor.monitor import Monitor

IDS = {"prompt_ids": [[1, 2]] * 8, "completion_ids": [[3] * 30] * 8}


def batch(nats=0.01):
    rng = np.random.default_rng(0)
    behavior = -rng.exponential(1.0, (8, 30)) - 0.5
    old = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
    return {"behavior_logprobs": behavior, "old_logprobs": old, "versions": 0, "trainer_version": 0}


def told():
    called = []
    actions = Actions(
        quarantine=lambda decision: called.append(("quarantine", decision.step)),
        stop_trainer=lambda decision: called.append(("stop", decision.step)),
    )
    return called, actions


class Full:
    def append(self, batch):
        raise ArchiveFull("no room")


ALL = [("quarantine", 0), ("quarantine", 1), ("quarantine", 2), ("stop", 2)]


def no_room(*_):
    raise OSError(28, "No space left on device")


def test_a_full_archive_keeps_no_action_from_running():
    called, actions = told()
    monitor = Monitor(archive=Full(), actions=actions)
    for step in range(3):
        with pytest.raises(ArchiveFull, match="no room") as raised:
            monitor.observe(**batch(0.5), **IDS, step=step)
        assert monitor.last.step == step
        assert f"step {step} was judged" in raised.value.__notes__[0]
    assert (called, monitor.state) == (ALL, State.HALT)


def test_a_state_that_cannot_be_written_keeps_no_action_from_running(tmp_path, monkeypatch):
    called, actions = told()
    monitor = Monitor(directory=tmp_path, actions=actions)
    monkeypatch.setattr(states, "write_document", no_room)
    for step in range(3):
        with pytest.raises(RecordError, match="No space left"):
            monitor.observe(**batch(0.5), **IDS, step=step)
    assert (called, monitor.state) == (ALL, State.HALT)
    assert len((tmp_path / STEPS).read_bytes().splitlines()) == 3
    assert (tmp_path / "archive").exists()
    with pytest.raises(RecordError):
        monitor.trigger_alert()
    with pytest.raises(RecordError):
        monitor.half_open()
    assert monitor.state is State.WARN
    monkeypatch.undo()
    assert monitor.observe(**batch(), step=3).state is State.WARN


def test_an_alert_acts_on_a_failing_disk(tmp_path):
    called, actions = told()
    monitor = Monitor(path=tmp_path / "no" / "state.json", actions=actions)
    (tmp_path / "no").rmdir()
    for _ in range(3):
        with pytest.raises(RecordError):
            monitor.trigger_alert()
    assert called == [("quarantine", 0)] * 3 + [("stop", 0)]


def test_both_errors_are_told(tmp_path):
    monitor = Monitor(path=tmp_path / "no" / "state.json", archive=Full())
    (tmp_path / "no").rmdir()
    with pytest.raises(RecordError, match="cannot be written") as raised:
        monitor.observe(**batch(0.5), **IDS)
    assert "ArchiveFull: no room" in raised.value.__notes__[0]


def test_an_interrupted_action_is_called_again():
    called = []

    def stop(decision):
        called.append(decision.step)
        if len(called) == 1:
            raise KeyboardInterrupt

    monitor = Monitor(actions=Actions(stop_trainer=stop))
    for _ in range(2):
        monitor.observe(**batch(0.5))
    with pytest.raises(KeyboardInterrupt):
        monitor.observe(**batch(0.5))
    monitor.observe(**batch(0.5))
    monitor.observe(**batch(0.5))
    assert called == [2, 3]


@pytest.mark.parametrize(
    "call",
    [
        lambda monitor: monitor.observe(**batch()),
        lambda monitor: monitor.trigger_alert(),
        lambda monitor: monitor.compare_rewards([0.0] * 50, [1.0] * 50),
        lambda monitor: monitor.half_open(),
        lambda monitor: monitor.rewind(0),
        lambda monitor: monitor.restore(monitor.remembered),
        lambda monitor: monitor.retake(batch()["behavior_logprobs"], batch()["old_logprobs"]),
    ],
)
def test_a_closed_monitor_writes_nothing_beside_its_successor(tmp_path, call):
    first = Monitor(directory=tmp_path)
    first.observe(**batch())
    first.close()
    second = Monitor(directory=tmp_path)
    second.observe(**batch())
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(InvalidValue, match="closed"):
        call(first)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    second.close()
