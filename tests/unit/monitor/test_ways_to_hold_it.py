"""How a trainer's author holds a monitor: in a `with`, in a message to another process, with a path of the wrong kind."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.core.errors import InvalidValue, RecordError
from zerodrift.monitor.actions import Actions
from zerodrift.monitor.decision import State
from zerodrift.monitor.monitor import Monitor
from zerodrift.records.archive.reader import ArchiveReader

ENGINE = -np.random.default_rng(0).exponential(1.0, (8, 40)) - 2.0


def bad():
    """With ids, so that it is archived."""
    return {
        "behavior_logprobs": ENGINE, "old_logprobs": ENGINE + 1.0, "versions": 0, "trainer_version": 0,
        "prompt_ids": [[1, 2]] * 8, "completion_ids": np.ones(ENGINE.shape, dtype=int),
    }  # fmt: skip


def test_in_a_with_it_lets_go_of_its_directory(tmp_path):
    with Monitor(directory=tmp_path) as monitor:
        assert monitor.log_step(0, 1e-4).state is State.OK
    with Monitor(directory=tmp_path) as again:
        assert again.remembered.step == 0
    with pytest.raises(InvalidValue):
        monitor.log_step(1, 1e-4)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kept", [True, False])
def test_a_copy_would_remember_something_else(tmp_path, copied, kept):
    """As an argument of a remote call it would be judged by a twin whose halt nobody hears."""
    monitor = Monitor(directory=tmp_path) if kept else Monitor()
    with pytest.raises(InvalidValue):
        copied(monitor)


@pytest.mark.parametrize("message", [None, ValueError("x"), 3])
def test_an_alert_says_something(tmp_path, message):
    with Monitor(directory=tmp_path) as monitor:
        with pytest.raises(InvalidValue):
            monitor.trigger_alert(message)
        assert monitor.state is State.OK
        assert monitor.log_step(0, 1e-4).state is State.OK


def test_a_path_that_is_a_directory_is_called_one(tmp_path):
    with pytest.raises(RecordError, match="is a directory"):
        Monitor(path=tmp_path)


@pytest.mark.parametrize("place", [{"directory": "run"}, {"path": "run/state.json"}, {"archive": "run"}])
def test_a_trainer_that_changes_its_directory_takes_no_monitor_along(tmp_path, monkeypatch, place):
    """A state that was written elsewhere from then on would be missing after a restart, and a halt with it."""
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "run").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    with Monitor(**place) as monitor:
        monitor.observe(**bad())
        monkeypatch.chdir(there)
        monitor.observe(**bad())
    assert list((there / "run").iterdir()) == []
    monkeypatch.chdir(here)
    with Monitor(**place) as again:
        assert again.remembered.observed == (0 if "archive" in place else 2)
    if "path" not in place:
        kept = here / "run" if "archive" in place else here / "run" / "archive"
        with ArchiveReader(str(kept)) as found:
            assert [entry.step for entry in found.entries()] == [0, 1]


def test_threads_take_turns(tmp_path):
    """A watchdog's alert while a batch is judged, or two scorers at once."""
    with Monitor(directory=tmp_path) as monitor:

        def work(place):
            for _ in range(10):
                monitor.trigger_alert("look") if place else monitor.observe(**bad())

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, [0, 0, 0, 1]))
        assert (monitor.remembered.observed, monitor.remembered.bad) == (30, 40)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 40


def too_few(): ...


@pytest.mark.parametrize("name", ["quarantine", "pause_engine", "stop_trainer", "fall_back"])
@pytest.mark.parametrize("call", ["stop", too_few, lambda decision, more: None])
def test_an_action_that_could_not_be_called_is_refused_before_it_is_needed(name, call):
    with pytest.raises(InvalidValue, match=name):
        Actions(**{name: call}, **({"known_good": "x"} if name == "fall_back" else {}))


@pytest.mark.parametrize("call", [print, [].append, lambda *told: None, lambda decision, more=1: None])
def test_one_that_can_be_called_is_taken(call):
    assert Actions(stop_trainer=call).stop_trainer is call


def test_an_action_may_end_the_program(tmp_path):
    """`sys.exit` is how a script stops: what comes after it runs, and the page hears of the halt."""
    called = []
    actions = Actions(stop_trainer=sys.exit, fall_back=called.append, known_good="exact")
    with Monitor(MonitoringConfig(consecutive_windows=1), directory=tmp_path, actions=actions) as monitor:
        with pytest.raises(SystemExit) as raised:
            monitor.observe(**bad())
        assert raised.value.code.step == monitor.last.step
        assert monitor.last.state is State.HALT
    assert called == ["exact"]
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1
