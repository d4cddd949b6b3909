"""Rewards of then and now, made up."""

from pathlib import Path

import numpy as np
import pytest

from zerodrift.audit.history import FAILS, RewardHistory, history_item, open_history, why_not_recorded
from zerodrift.core.errors import RecordError
from zerodrift.records.preflight import Item, PreflightRecord, Status, write_preflight
from zerodrift.records.rewards import Rewards, append


def rewards(mean: float = 0.9, std: float = 0.3, n: int = 100, task: str = "sums") -> Rewards:
    return Rewards(task=task, mean=mean, std=std, n=n, when="2026-11-15")


def drawn(rng: np.random.Generator, solved: float) -> Rewards:
    values = rng.random(100) < solved
    return rewards(float(values.mean()), float(values.std(ddof=1)))


def test_drift_is_seen_and_its_absence_is_not_taken_for_it():
    rng = np.random.default_rng(0)
    runs = tuple(drawn(rng, 0.9) for _ in range(3))
    drifted = history_item(drawn(rng, 0.6), runs, Status.PASS)
    assert drifted.status is Status.FAIL
    assert float(drifted.facts["p"]) < FAILS
    assert drifted.type
    healthy = [history_item(drawn(rng, 0.9), runs, Status.PASS).status for _ in range(200)]
    assert Status.FAIL not in healthy
    assert healthy.count(Status.PASS) > 190


@pytest.mark.parametrize(
    ("compared", "says"),
    [
        (Status.PASS, "engine and reference agree, so weights, sampling, prompts or the task"),
        (Status.FAIL, "engine and reference do not agree either: mend that first"),
        (Status.INCONCLUSIVE, "p = "),
    ],
)
def test_a_failure_says_whether_the_engine_can_be_the_reason(compared, says):
    item = history_item(rewards(0.5), (rewards(0.9),), compared)
    assert item.status is Status.FAIL
    assert says in item.message
    assert ("engine and reference" in item.message) is (compared is not Status.INCONCLUSIVE)


def test_a_pass_shows_both_means_and_the_interval():
    item = history_item(rewards(0.91), (rewards(0.9), rewards(0.9)), Status.PASS)
    assert item.status is Status.PASS
    assert item.type == ()
    assert item.message == (
        "mean reward 0.91 over 100 prompts, 0.9 over 100 in the history: "
        "difference +0.01 [-0.074, +0.094], p = 0.81"
    )
    assert item.facts["history_runs"] == 2


def test_between_pass_and_fail_there_is_a_warning():
    item = history_item(rewards(0.77), (rewards(0.9),), Status.PASS)
    assert item.status is Status.WARN
    assert "which one healthy run in 4" in item.message
    assert item.type


@pytest.mark.parametrize(
    ("now", "then", "says"),
    [
        (rewards(n=19), rewards(), "19 prompts have rewards now or then, and 20 are needed"),
        (rewards(), rewards(n=2), "2 prompts have rewards now or then"),
        (rewards(1.0, 0.0), rewards(1.0, 0.0), "every reward is 1, now and then"),
    ],
)
def test_what_cannot_be_compared_is_not_passed(now, then, says):
    item = history_item(now, (then,), Status.PASS)
    assert item.status is Status.INCONCLUSIVE
    assert says in item.message
    assert item.type


def test_never_solved_after_always_solved_is_a_failure():
    assert history_item(rewards(0.0, 0.0), (rewards(1.0, 0.0),), Status.INCONCLUSIVE).status is Status.FAIL


# --- where a history comes from, and what becomes part of it -------------------------------------------------------


def checklist(given: Rewards | None, /, **statuses: Status) -> PreflightRecord:
    asked = {"audit": Status.PASS, "rewards": Status.PASS, "history": Status.PASS, **statuses}
    items = tuple(Item(name=name, status=status, message="") for name, status in asked.items())
    return PreflightRecord(status=Status.PASS, config="c", engine="e", model="m", items=items, rewards=given)


def test_a_file_or_an_earlier_run(tmp_path):
    append(tmp_path / "h.jsonl", rewards())
    assert open_history(tmp_path / "h.jsonl") == RewardHistory(tmp_path / "h.jsonl", (rewards(),))
    write_preflight(tmp_path, checklist(rewards(0.5)))
    assert open_history(tmp_path) == RewardHistory(tmp_path, (rewards(0.5),))


def test_an_earlier_run_without_rewards(tmp_path):
    with pytest.raises(RecordError, match="it is not a finished preflight"):
        open_history(tmp_path)
    write_preflight(tmp_path, checklist(None))
    with pytest.raises(RecordError, match="is a preflight without rewards"):
        open_history(tmp_path)


def test_a_history_of_another_task_is_refused_by_its_line():
    history = RewardHistory(Path("h.jsonl"), (rewards(), rewards(task="chess")))
    with pytest.raises(RecordError, match=r"h\.jsonl, line 2: rewards of task 'chess', and the .* is 'sums'"):
        history.check_task("sums")
    RewardHistory(Path("h.jsonl"), (rewards(),)).check_task("sums")


@pytest.mark.parametrize(
    ("statuses", "same", "why"),
    [
        ({}, True, None),
        ({"history": Status.WARN}, True, None),
        ({"history": Status.FAIL}, False, None),
        ({"history": Status.FAIL}, True, "does not fit what is in it"),
        ({"audit": Status.FAIL}, False, "audit is FAIL"),
        ({"rewards": Status.INCONCLUSIVE}, False, "rewards is INCONCLUSIVE"),
    ],
)
def test_only_what_the_reference_would_have_got_becomes_history(statuses, same, why):
    found = why_not_recorded(checklist(rewards(), **statuses), to_the_same=same)
    assert found is None if why is None else why in (found or "")
