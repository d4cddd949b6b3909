"""The page of long runs: what a lane did is kept, and one that is old, failed or unknown is not passed over."""

import datetime
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TODAY = datetime.date(2026, 3, 20)


@pytest.fixture
def long_runs(script):
    return script("long_runs")


@pytest.fixture
def fresh(long_runs):
    """Every lane passed yesterday."""
    run = long_runs.Run(TODAY - datetime.timedelta(days=1), "abc1234", passed=True, minutes=12.5)
    return dict.fromkeys(long_runs.LANES, run)


@pytest.mark.parametrize(
    ("change", "warned"),
    [
        ({}, False),
        ({"date": TODAY - datetime.timedelta(days=7)}, False),
        ({"date": TODAY - datetime.timedelta(days=8)}, True),
        ({"passed": False}, True),
        (None, True),
    ],
    ids=["yesterday", "a week ago", "eight days ago", "failed", "never"],
)
def test_old_failed_and_missing_lanes_are_warned_of(long_runs, fresh, change, warned):
    last = fresh.pop("history")
    if change is not None:
        fresh["history"] = last._replace(**change)
    found = long_runs.warnings(fresh, TODAY)
    assert [line.split()[0] for line in found] == (["history"] if warned else [])
    assert all("make long LANE=history" in line for line in found)


def test_what_is_written_is_read_again(long_runs, fresh):
    page = f"# A page\n\nprose\n\n{long_runs.HEAD}"
    del fresh["coverage"]
    fresh["history"] = fresh["history"]._replace(passed=False, commit="abc1234+")
    written = long_runs.write(page, fresh)
    assert long_runs.read(written) == fresh
    assert written.startswith(page)
    assert long_runs.write(written, fresh) == written


@pytest.mark.parametrize(
    "row",
    [
        "| `no-such-lane` | x | 2026-03-01 | `abc` | pass | 1.0 |",
        "| `history` | x | 2026-03-01 | `abc` | perhaps | 1.0 |",
        "| `history` | x | last week | `abc` | pass | 1.0 |",
        "| `history` | x | 2026-03-01 | `abc` | pass |",
    ],
)
def test_a_row_that_cannot_be_read_is_an_error(long_runs, row):
    with pytest.raises(long_runs.UnreadablePage):
        long_runs.read(row)
    with pytest.raises(long_runs.UnreadablePage):
        long_runs.write("# prose alone\n", {})


def test_the_page_is_readable_and_lanes_are_targets_of_make(long_runs):
    long_runs.read(long_runs.PAGE.read_text())
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(long_runs.LANES) <= targets
    assert all((ROOT / path).exists() for path in long_runs.CODE)


def test_code_is_compared_with_commits_that_exist(long_runs):
    assert not long_runs.unchanged_since("abc1234+")
    assert not long_runs.unchanged_since("no-such-commit")


@pytest.mark.parametrize("same_code", [True, False])
def test_rows_of_other_code_are_no_result_of_this_one(long_runs, monkeypatch, tmp_path, same_code):
    rows = tmp_path / "docs" / "would-have-caught.jsonl"
    rows.parent.mkdir()
    monkeypatch.setattr(long_runs, "ROOT", tmp_path)
    monkeypatch.setattr(long_runs, "BEGUN", tmp_path / "begun")
    monkeypatch.setattr(long_runs, "unchanged_since", lambda commit: commit == "abc1234" and same_code)
    rows.write_text("of some day\n")
    long_runs.begin_anew("history", "abc1234")
    assert not rows.exists(), "nobody knows which code wrote them"
    rows.write_text("of a run that was stopped\n")
    long_runs.begin_anew("history", "abc1234")
    assert rows.exists() is same_code


def test_every_file_of_rows_is_there(long_runs):
    assert all((ROOT / name).exists() for names in long_runs.ROWS.values() for name in names)


@pytest.mark.parametrize("mark", ["engines", "browser"])
def test_what_has_a_mark_is_where_make_looks_for_it(mark):
    """One that stood elsewhere would never run."""
    [folders] = re.findall(rf"^{mark.upper()} := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marked = [file for file in (ROOT / "tests").rglob("*.py") if f"mark.{mark}" in file.read_text()]
    assert marked
    astray = [
        file for file in marked if not any(file.is_relative_to(ROOT / each) for each in folders.split())
    ]
    assert not astray
