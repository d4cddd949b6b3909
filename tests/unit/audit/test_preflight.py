"""Whole checklists on a tiny model: one that passes, one whose engine is wrong, and what becomes of the rest."""

from pathlib import Path

import msgspec
import pytest

from zerodrift.audit import preflight as module
from zerodrift.audit.checklist import doctor_item
from zerodrift.audit.history import RewardHistory
from zerodrift.audit.preflight import Preflight
from zerodrift.audit.progress import Silent
from zerodrift.config.load import load
from zerodrift.core.errors import ConfigError, RecordError
from zerodrift.doctor.command import CommandLine
from zerodrift.records.preflight import PREFLIGHT, Item, PreflightRecord, Status, read_preflight
from zerodrift.records.rewards import Rewards

COMMAND = "zerodrift preflight run.yaml"
# A reward that varies with every sample, of a model that was taught nothing.
TASK = """
from zerodrift.core.request import Prompt

class Task:
    name = "spread"
    def prompts(self, count, seed):
        return [Prompt((5 + number, 7, 9)) for number in range(count)]
    def reward(self, prompt, completion):
        return sum(completion.token_ids) % 97 / 97

task = Task()
"""
SERVED = "vllm serve Q --logprobs-mode processed_logprobs --generation-config vllm --no-enable-prefix-caching"
NAMES = ["doctor", "audit", "weight-sync", "rewards", "history"]


@pytest.fixture(autouse=True)
def _a_task(tmp_path, monkeypatch):
    (tmp_path / "spread_of_tokens.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)


def preflight(
    directory: Path, *, engine: str = "{name: exact}", task: str | None = "spread_of_tokens:task"
) -> Preflight:
    path = directory / "run.yaml"
    path.write_text(
        f"model: {{path: 'testbed:llama'}}\nengine: {engine}\nsampling_defaults: {{temperature: 0.7}}\n"
        f"validation: {{num_prompts: 24, equivalence_trials: 48, max_tokens: 6, task: {task or 'null'}}}\n"
    )
    return Preflight(path=path, config=load(path), directory=directory / "run")


def statuses(record: PreflightRecord) -> dict[str, Status]:
    return {item.name: item.status for item in record.items}


def says(record: PreflightRecord, name: str) -> str:
    return next(item.message for item in record.items if item.name == name)


def drifted(rewards: Rewards, by: float) -> Rewards:
    return msgspec.structs.replace(rewards, mean=rewards.mean + by * rewards.std, when="2026-01-01")


def test_a_healthy_engine_passes_and_a_drifted_history_fails_it(tmp_path):
    asked = preflight(tmp_path)
    first = asked.run(Silent(), COMMAND)
    assert statuses(first) == dict.fromkeys(NAMES[:4], Status.PASS) | {"history": Status.SKIPPED}
    assert (first.status, first.reproduce) == (Status.PASS, COMMAND)
    assert read_preflight(asked.directory) == first
    rewards = first.rewards
    assert rewards is not None
    assert (rewards.task, rewards.n) == ("spread", 24)
    far = RewardHistory(tmp_path / "h.jsonl", (drifted(rewards, 2.0),))
    with pytest.raises(RecordError, match="holds a finished run"):
        asked.run(Silent(), COMMAND)
    elsewhere = msgspec.structs.replace(asked, directory=tmp_path / "again", history=far, sync=False)
    again = elsewhere.run(Silent(), COMMAND)
    assert statuses(again) == statuses(first) | {"weight-sync": Status.SKIPPED, "history": Status.FAIL}
    assert again.status is Status.FAIL
    assert "engine and reference agree" in says(again, "history")


@pytest.mark.parametrize(
    ("by", "status", "told"),
    [
        (2.0, Status.FAIL, "p = "),
        (0.1, Status.PASS, "p = "),
        (None, Status.SKIPPED, "holds this very run alone"),
    ],
)
def test_a_history_is_compared_with_without_the_run_itself(tmp_path, by, status, told):
    rewards = Rewards(task="spread", mean=0.5, std=0.2, n=40, when="2026-11-15")
    runs = (rewards,) if by is None else (rewards, drifted(rewards, by))
    asked = msgspec.structs.replace(preflight(tmp_path), history=RewardHistory(tmp_path / "h.jsonl", runs))
    item = asked._history(rewards, Item(name="rewards", status=Status.PASS, message=""))
    assert item.status is status
    assert told in item.message


@pytest.mark.parametrize(
    ("recorded", "status", "typed"),
    [
        (False, Status.PASS, "--record FILE now, and --history FILE the next time"),
        (True, Status.PASS, "--history rewards.jsonl the next time"),
        (True, Status.INCONCLUSIVE, "settle rewards first: what does not pass is not recorded"),
    ],
)
def test_nobody_is_told_to_record_what_is_recorded_or_refused(tmp_path, recorded, status, typed):
    to = RewardHistory(Path("rewards.jsonl"), ()) if recorded else None
    asked = msgspec.structs.replace(preflight(tmp_path), recorded=to)
    assert asked._history(None, Item(name="rewards", status=status, message="")).type == (typed,)


def test_an_engine_that_reports_raw_logprobs_fails_and_is_named(tmp_path):
    asked = preflight(tmp_path, engine="{name: reference, logprobs_mode: raw_logprobs}", task=None)
    record = asked.run(Silent(), COMMAND)
    assert record.status is Status.FAIL
    assert statuses(record) == {
        "doctor": Status.FAIL,
        "audit": Status.FAIL,
        "weight-sync": Status.PASS,
        "rewards": Status.SKIPPED,
        "history": Status.SKIPPED,
    }
    assert says(record, "audit").startswith("semantic/raw-logprobs: ")
    assert "names no task" in says(record, "rewards")


def test_an_engine_that_cannot_be_reached_ends_no_checklist(tmp_path):
    asked = preflight(tmp_path, engine="{name: vllm, url: 'http://127.0.0.1:9'}")
    history = RewardHistory(tmp_path / "h", (Rewards(task="spread", mean=0, std=1, n=50, when=""),))
    record = msgspec.structs.replace(asked, history=history).run(Silent(), COMMAND)
    assert record.status is Status.INCONCLUSIVE
    assert statuses(record) == {
        "doctor": Status.INCONCLUSIVE,
        "audit": Status.INCONCLUSIVE,
        "weight-sync": Status.SKIPPED,
        "rewards": Status.SKIPPED,
        "history": Status.SKIPPED,
    }
    assert "http://127.0.0.1:9: cannot be judged" in says(record, "doctor")
    assert says(record, "weight-sync") == "not run: audit did not get that far"
    assert says(record, "history") == "not run: rewards did not get that far"
    assert "--sync --out " in record.items[1].type[0]


def test_without_a_task_and_an_update_two_questions_are_left(tmp_path):
    asked = msgspec.structs.replace(
        preflight(tmp_path, engine="{name: vllm, url: 'http://127.0.0.1:9'}", task=None), sync=False
    )
    record = asked.run(Silent(), COMMAND)
    assert [item.status for item in record.items[2:]] == [Status.SKIPPED] * 3
    assert says(record, "weight-sync") == "left out with --no-sync"


@pytest.mark.long
def test_an_engine_that_takes_no_update_is_not_judged_and_can_be_spared_it(tmp_path):
    def bare(engine):
        engine.capabilities = frozenset()
        return engine

    asked = msgspec.structs.replace(preflight(tmp_path, engine="{name: reference}", task=None), wrap=bare)
    record = asked.run(Silent(), COMMAND)
    sync = record.items[2]
    assert (sync.status, sync.type) == (Status.INCONCLUSIVE, (f"{COMMAND} --no-sync",))


def test_what_the_doctor_cannot_read_is_audited_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise ConfigError("odd YAML")

    monkeypatch.setattr(module, "open_target", refuse)
    (judged,) = preflight(tmp_path)._judged()
    assert judged.diagnosis == "cannot be judged: odd YAML"


def test_the_running_server_is_asked_with_what_the_file_says(tmp_path, monkeypatch):
    """At temperature 0.7, which only the file knows, its default logprobs mode is wrong."""
    asked = preflight(tmp_path, engine="{name: vllm, url: 'http://x:1', api_key_env: OUR_KEY}")
    monkeypatch.delenv("OUR_KEY", raising=False)
    with pytest.raises(ConfigError, match="OUR_KEY, which is not set"):
        asked._judged()
    monkeypatch.setenv("OUR_KEY", "k")
    keys = []

    def server(url, *, api_key, advice):
        keys.append((url, api_key))
        assert "engine.api_key_env" in advice.key  # a checklist has no options for it
        return CommandLine("vllm serve Q")

    monkeypatch.setattr(module, "Server", server)
    item = doctor_item(asked._judged())
    assert keys == [("http://x:1", "k")]
    assert item.status is Status.FAIL
    assert item.type == ("zerodrift doctor http://x:1 --api-key-env OUR_KEY --fix",)
    assert any("raw_logprobs" in detail for detail in item.details)
    assert not any("ask it with" in detail for detail in item.details)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (f"{SERVED} --no-async-scheduling", Status.PASS),
        (SERVED, Status.WARN),
        # The control: what the server itself does not show is not known.
        (f"{SERVED} --no-async-scheduling --logprobs-mode $MODE", Status.INCONCLUSIVE),
    ],
)
def test_a_file_that_names_a_server_is_as_good_as_the_server(tmp_path, monkeypatch, command, status):
    """To the file alone the server is unknown; it was asked, so that nothing is left open by that."""
    asked = preflight(tmp_path, engine="{name: vllm, url: 'http://x:1'}")
    monkeypatch.setattr(module, "Server", lambda *_, **__: CommandLine(command))
    item = doctor_item(asked._judged())
    assert item.status is status
    assert item.message.count("http://x:1: ") == 1


# --- refused before the directory is touched --------------------------------------------------------------------


@pytest.mark.parametrize("field", ["history", "recorded"])
def test_a_history_of_another_task(tmp_path, field):
    other = RewardHistory(tmp_path / "h.jsonl", (Rewards(task="chess", mean=0, std=1, n=50, when=""),))
    asked = msgspec.structs.replace(preflight(tmp_path), **{field: other})
    with pytest.raises(RecordError, match=r"line 1: rewards of task 'chess', and the .* is 'spread'"):
        asked.run(Silent())
    assert not asked.directory.exists()


def test_a_damaged_checklist_of_before(tmp_path):
    asked = preflight(tmp_path)
    asked.directory.mkdir()
    (asked.directory / "config.yaml").touch()
    (asked.directory / PREFLIGHT).write_text("{")
    with pytest.raises(RecordError, match="cannot be read"):
        asked.run(Silent())


def test_a_directory_of_other_things(tmp_path):
    asked = msgspec.structs.replace(preflight(tmp_path), directory=tmp_path)
    with pytest.raises(RecordError, match="holds other things than a run"):
        asked.run(Silent())
    assert not (tmp_path / PREFLIGHT).exists()
