import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerodrift.config.load import dump
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import DigestMismatch, RecordError
from zerodrift.records.verdict import Outcome
from zerodrift.view.comparison import compare_runs
from zerodrift.view.runs import RunSummary, State, find_run, list_runs


def at(path: Path, hour: int) -> None:
    moment = datetime(2026, 11, 15, hour, tzinfo=UTC).timestamp()
    os.utime(path, (moment, moment))


@pytest.fixture
def folder(tmp_path: Path, examples: Any) -> Path:
    """Four runs, each with its hour, and two things that are none."""
    examples.passing(tmp_path / "first")
    at(tmp_path / "first" / "verdict.json", 1)
    examples.failing(tmp_path / "second")
    at(tmp_path / "second" / "verdict.json", 2)
    for name, files in (("killed", ("config.yaml", "rollouts.jsonl")), ("broken", ("verdict.json",))):
        (tmp_path / name).mkdir()
        for hour, file in enumerate(files, start=3):
            (tmp_path / name / file).write_text(dump(RunConfig()))
            at(tmp_path / name / file, hour)
    (tmp_path / "notes").mkdir()
    (tmp_path / "verdict.json").touch()
    return tmp_path


def test_newest_first_and_nothing_left_out(folder: Path) -> None:
    found = killed, broken, second, first = list_runs(folder)
    # Of an unfinished run the last file counts, whichever it is.
    named = [("killed", 4), ("broken", 3), ("second", 2), ("first", 1)]
    assert [(run.name, run.when.hour) for run in found] == named
    assert (first.verdict, first.cause, first.engine) == (Outcome.PASS, None, "vllm")
    assert first.mean is not None
    assert (second.verdict, second.cause) == (Outcome.FAIL, "semantic/raw-logprobs")
    assert (killed.state, killed.verdict, killed.engine) == (State.UNFINISHED, None, "exact")
    assert broken.state is State.UNREADABLE
    assert "verdict.json" in str(broken.problem)


def test_an_edited_verdict_is_listed_as_altered(folder: Path) -> None:
    path = folder / "second" / "verdict.json"
    path.write_text(path.read_text().replace('"FAIL"', '"PASS"', 1))
    second = next(run for run in list_runs(folder) if run.name == "second")
    assert (second.state, second.verdict) == (State.ALTERED, None)
    with pytest.raises(DigestMismatch):
        compare_runs(folder / "first", folder / "second")


def test_a_run_with_a_configuration_of_another_version_is_listed(folder: Path) -> None:
    (folder / "killed" / "config.yaml").write_text("engine: {retired: 1}\n")
    killed = next(run for run in list_runs(folder) if run.name == "killed")
    assert killed.state is State.UNREADABLE
    assert "retired" in str(killed.problem)


def test_runs_of_one_moment_are_in_order_of_their_names_utf8_or_not(tmp_path: Path, examples: Any) -> None:
    for name in ("b", "a", os.fsdecode(b"c-\xff")):
        at(examples.inconclusive(tmp_path / name) / "verdict.json", 1)
    found = list_runs(tmp_path)
    assert [run.name for run in found] == [r"c-\udcff", "b", "a"]
    assert found[0].mean is None
    assert msgspec.json.decode(msgspec.json.encode(found), type=tuple[RunSummary, ...]) == found


def test_an_empty_directory_holds_no_runs_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    assert list_runs(tmp_path) == ()
    with pytest.raises(RecordError):
        list_runs(tmp_path / "nowhere")


def test_a_run_is_found_by_path_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert find_run("one") == Path("runs/one")
    assert find_run("runs/one") == Path("runs/one")
    assert find_run("one", tmp_path / "runs") == tmp_path / "runs" / "one"
    # A directory here comes before one of the same name among the runs.
    (tmp_path / "one").mkdir()
    assert find_run("one") == Path("one")
    with pytest.raises(RecordError):
        find_run("two")
