"""One directory for all that a monitor leaves behind."""

import contextlib

import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import ArchiveLocked, InvalidValue, RecordError
from zerodrift.monitor.baseline import of_canary
from zerodrift.monitor.decision import State
from zerodrift.monitor.directory import STEPS
from zerodrift.monitor.metrics import metrics_of
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.steps import Line
from zerodrift.records.archive.reader import ArchiveReader
from zerodrift.records.archive.writer import Archive


def batch(step, nats=0.01, **more):
    rng = np.random.default_rng(step)
    behavior = -rng.exponential(1.0, (16, 40)) - 0.5
    old = np.minimum(behavior + rng.normal(0, nats, behavior.shape), 0)
    return {"behavior_logprobs": behavior, "old_logprobs": old, "versions": 0, "trainer_version": 0, **more}


IDS = {"prompt_ids": [[1, 2]] * 16, "completion_ids": [[3] * 40] * 16}


def lines(directory):
    return [msgspec.json.decode(line, type=Line) for line in (directory / STEPS).read_bytes().splitlines()]


def test_a_line_for_each_decision_and_a_restart_goes_on(tmp_path):
    first = Monitor(directory=tmp_path / "new" / "run")
    decisions = [first.observe(**batch(0)), first.observe(**batch(1, nats=0.3)), first.trigger_alert("seen")]
    first.close()
    second = Monitor(directory=tmp_path / "new" / "run")
    assert second.state is State.QUARANTINE
    decisions.append(second.observe(**batch(2)))
    second.close()
    found = lines(tmp_path / "new" / "run")
    assert [(line.step, line.state) for line in found] == [(each.step, each.state) for each in decisions]
    assert [line.step for line in found] == [0, 1, 1, 2]
    assert found[0].metrics == metrics_of(decisions[0])
    assert set(found[0].not_observable) == {"staleness", "update"}


def test_bad_batches_with_ids_are_kept_and_those_without_need_no_archive(tmp_path):
    monitor = Monitor(directory=tmp_path)
    monitor.observe(**batch(0, nats=0.3))
    assert not (tmp_path / "archive").exists()
    monitor.observe(**batch(1, nats=0.3), **IDS)
    monitor.observe(**batch(2))
    monitor.close()
    assert [entry.step for entry in ArchiveReader(tmp_path / "archive").entries()] == [1]
    monitor.close()


def test_half_a_rollout_that_was_scored_again_is_not_archived_as_a_whole_one(tmp_path):
    given = batch(0, nats=0.3)
    for step, mask in enumerate(([True] * 16, [True] * 4 + [False] * 12)):
        monitor = Monitor(directory=tmp_path / str(step))
        monitor.observe(**given, rescored_logprobs=given["old_logprobs"], rescored_mask=mask, **IDS)
        monitor.close()
        with ArchiveReader(tmp_path / str(step) / "archive") as reader:
            (entry,) = reader.entries()
            kept = [rollout.rescored_logprobs is not None for rollout in reader.read(entry).rollouts]
        assert kept == [all(mask)] * 16


def test_one_monitor_at_a_time(tmp_path):
    monitor = Monitor(directory=tmp_path)
    with pytest.raises(ArchiveLocked):
        Monitor(directory=tmp_path)
    monitor.close()
    Monitor(directory=tmp_path).close()


def test_what_cannot_be_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError):
        Monitor(directory=tmp_path / "file")
    with pytest.raises(InvalidValue):
        Monitor(directory=tmp_path, path=tmp_path / "state.json")


def test_a_line_that_a_kill_tore_harms_no_other(tmp_path):
    (tmp_path / STEPS).write_bytes(b'{"step": 1, "sta')
    monitor = Monitor(directory=tmp_path)
    monitor.log_step(2, kl_estimate=1e-4)
    monitor.close()
    torn, whole = (tmp_path / STEPS).read_bytes().splitlines()
    assert torn == b'{"step": 1, "sta'
    assert msgspec.json.decode(whole, type=Line).step == 2


def test_a_line_that_cannot_be_written_stops_no_training(tmp_path, caplog):
    monitor = Monitor(directory=tmp_path)
    (tmp_path / STEPS).mkdir()
    assert monitor.log_step(0, kl_estimate=1e-4).state is State.OK
    assert monitor._directory.failures == 1
    assert "1 lines are missing" in caplog.text
    monitor.close()


def test_what_log_step_was_given_is_in_the_decision(tmp_path):
    decision = Monitor().log_step(0, kl_estimate=1e-4, reward_mean=0.25)
    found = metrics_of(decision)
    assert (found["zerodrift/kl_estimate"], found["zerodrift/reward/mean"]) == (1e-4, 0.25)
    assert found["zerodrift/mismatch/observable"] == 0


def test_the_band_of_rewards_is_where_a_shift_begins():
    rng = np.random.default_rng(0)
    monitor = Monitor()
    for step in range(5):
        view = monitor.observe(**batch(step), rewards=rng.random(16)).rewards
    assert view.baseline_mean == pytest.approx(0.5, abs=0.1)
    # 16 uniform values of σ 0.29: 0.29 · sqrt(2/16) · t(1e-5) of about five.
    assert 0.4 < view.baseline_margin < 0.65
    far = monitor.observe(**batch(6), rewards=rng.random(16) + 2).rewards
    assert far.mean - far.baseline_mean > far.baseline_margin


def test_an_archive_that_the_monitor_opened_is_let_go_at_its_close(tmp_path):
    first = Monitor(archive=tmp_path)
    first.observe(**batch(0, nats=0.3), **IDS)
    first.close()
    with contextlib.closing(Monitor(archive=tmp_path)) as second:
        second.observe(**batch(1, nats=0.3), **IDS, step=1)
    assert [entry.step for entry in ArchiveReader(tmp_path).entries()] == [0, 1]
    first.close()


def test_an_archive_that_the_caller_opened_is_the_callers(tmp_path):
    with Archive(tmp_path) as mine:
        monitor = Monitor(archive=mine)
        monitor.observe(**batch(0, nats=0.3), **IDS)
        monitor.close()
        with pytest.raises(ArchiveLocked):
            Monitor(archive=tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"baseline": of_canary(np.full(2000, -1.0), np.full(2000, -1.5))},
        {"path": "state.json"},
        {"archive": "state.json"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_monitor_that_could_not_be_made_holds_nothing(tmp_path, given):
    """Its error may be kept, as an interactive session does, and all that was locked with it."""
    (tmp_path / "state.json").write_text("{")
    places = {"directory": tmp_path / "run"} if "path" not in given else {"archive": tmp_path / "archive"}
    given = {key: tmp_path / value if value == "state.json" else value for key, value in given.items()}
    with pytest.raises((InvalidValue, RecordError)) as kept:
        Monitor(**{**places, **given})
    Monitor(**places).close()
    assert kept.value is not None
