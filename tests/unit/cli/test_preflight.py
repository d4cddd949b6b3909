"""The command line of a preflight: which words go where, what is refused, what comes out.

The checklist itself is replaced by one that ends as its model is called; what it does is tested where it lives.
"""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerodrift.audit import preflight
from zerodrift.cli.main import main
from zerodrift.records.preflight import Item, PreflightRecord, Status, read_preflight, write_preflight
from zerodrift.records.rewards import Rewards, append, read_history

REWARDS = Rewards(task="sums", mean=0.9, std=0.1, n=100, when="2026-11-15")


class Asked(SimpleNamespace):
    """How the checklist was called."""

    config: Any
    directory: Path
    history: Any

    def run(self, progress: Any, reproduce: str) -> PreflightRecord:
        progress.stage("doctor")
        status = Status((self.config.model.path or "pass").upper())
        items = tuple(
            Item(name=name, status=status, message="so") for name in ("audit", "rewards", "history")
        )
        named = {"config": "c", "engine": "e", "model": "m", "reproduce": reproduce}
        record = PreflightRecord(status=status, items=items, rewards=REWARDS, **named)
        self.directory.mkdir(parents=True, exist_ok=True)
        write_preflight(self.directory, record)
        return record


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Every preflight that a test started."""
    monkeypatch.chdir(tmp_path)
    calls: list[Asked] = []

    def recorded(**fields):
        calls.append(Asked(**fields))
        return calls[-1]

    monkeypatch.setattr(preflight, "Preflight", recorded)
    Path("plain.yaml").write_text("engine: {name: exact}\nmodel: {path: pass}\n")
    for ending in Status:
        Path(f"{ending.lower()}.yaml").write_text(f"model: {{path: {ending}}}\nvalidation: {{task: sums}}\n")
    return calls


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["preflight", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("warn", 0), ("fail", 1), ("inconclusive", 3)])
def test_the_exit_code_is_the_worst_item(asked, ending, code):
    assert run(f"{ending}.yaml") == code
    assert len(asked) == 1


def test_a_run_leaves_its_page_and_says_where(asked, capsys):
    assert run("plain.yaml", "--out", "here", "--no-reset-cache") == 0
    (call,) = asked
    assert (call.sync, call.resets_cache, call.history, call.recorded) == (True, False, None, None)
    assert (call.path, call.config.engine.name) == (Path("plain.yaml"), "exact")
    assert json.loads(call.environment)["python"]
    assert "here/preflight.html" in capsys.readouterr().out
    assert Path("here/preflight.html").is_file()


def test_without_out_a_directory_is_made(asked):
    run("plain.yaml", "--no-sync")
    assert asked[0].directory.parent == Path("runs")
    assert asked[0].sync is False


@pytest.mark.usefixtures("asked")
def test_json_is_the_record(capsys):
    run("fail.yaml", "--json", "--out", "here", "--record", "h.jsonl")
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "FAIL"
    assert json.loads(out) == json.loads(Path("here/preflight.json").read_bytes())
    assert err == "not recorded in h.jsonl: audit is FAIL\n"
    assert read_preflight(Path("here")).reproduce == shlex.join(["zerodrift", *sys.argv[1:]])


def test_rewards_are_recorded_once_and_compared_the_next_time(asked, capsys):
    assert run("pass.yaml", "--record", "deep/h.jsonl") == 0
    assert run("pass.yaml", "--record", "deep/h.jsonl", "--history", "deep/h.jsonl") == 0
    assert capsys.readouterr().err.splitlines() == [
        "recorded in deep/h.jsonl",
        "recorded in deep/h.jsonl before",
    ]
    assert asked[1].history.runs == asked[1].recorded.runs == (REWARDS,)
    assert read_history(Path("deep/h.jsonl")) == (REWARDS,)


def test_an_earlier_run_is_a_history(asked):
    assert run("pass.yaml", "--out", "first") == 0
    assert run("pass.yaml", "--history", "first") == 0
    assert asked[1].history.runs == (REWARDS,)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "CONFIG"),
        ("none.yaml", "none.yaml"),
        ("typo.yaml", "engine.name"),
        ("plain.yaml --history good.jsonl", "validation.task"),
        ("plain.yaml --record good.jsonl", "validation.task"),
        ("plain.yaml --no-sync --no-reset-cache", "--no-sync"),
        ("pass.yaml --history none.jsonl", "none.jsonl"),
        ("pass.yaml --history empty.jsonl", "empty.jsonl"),
        ("pass.yaml --history bad.jsonl", "bad.jsonl, line 2: "),
        ("pass.yaml --record bad.jsonl", "bad.jsonl, line 2: "),
        ("pass.yaml --record /proc/h.jsonl", "/proc/h.jsonl"),
        ("pass.yaml --format yaml", "--format"),
        ("nameless.yaml", "model.path"),
    ],
)
def test_wrong_usage_starts_nothing(asked, capsys, arguments, named):
    Path("nameless.yaml").write_text("engine: {name: exact}\n")
    Path("typo.yaml").write_text("engine: {nane: exact}\n")
    append(Path("good.jsonl"), REWARDS)
    Path("bad.jsonl").write_text(Path("good.jsonl").read_text() + '{"task": "sums"}\n')
    Path("empty.jsonl").touch()
    assert run(*arguments.split()) == 2
    assert named in " ".join(capsys.readouterr().err.split())
    assert not asked


def test_an_empty_file_can_be_recorded_into(asked):
    Path("empty.jsonl").touch()
    assert run("pass.yaml", "--record", "empty.jsonl") == 0
    assert asked[0].recorded.runs == ()
    assert read_history(Path("empty.jsonl")) == (REWARDS,)
