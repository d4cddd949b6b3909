import io
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from zerodrift.records.directory import read_verdict, write_verdict
from zerodrift.records.verdict import Outcome
from zerodrift.view.comparison import Change, SameRequests, compare_runs
from zerodrift.view.runs import RunSummary, State, list_runs
from zerodrift.view.tables import print_comparison, print_runs

MOMENT = datetime(2026, 11, 15, 3, 10, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader five and a half hours east of UTC, where no time can be right by chance."""
    before = os.environ.get("TZ")
    monkeypatch.setenv("TZ", "IST-5:30")
    time.tzset()
    yield
    monkeypatch.undo()
    assert os.environ.get("TZ") == before
    time.tzset()


def printed(what: object, *, width: int = 80, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system="standard" if terminal else None
    )
    print_runs(what, console) if isinstance(what, tuple) else print_comparison(what, console)  # type: ignore[arg-type]
    return file.getvalue()


def summary(name: str, **more: object) -> RunSummary:
    return RunSummary(name=name, when=MOMENT, **{"state": State.FINISHED, **more})  # type: ignore[arg-type]


def test_a_run_is_one_line_however_narrow_the_terminal() -> None:
    runs = (
        summary(
            "audit-20261115-084000",
            verdict=Outcome.FAIL,
            cause="semantic/raw-logprobs",
            engine="vllm",
            model="/checkpoints/" + "deep/" * 40,
            mean=0.152,
        ),
        summary("short", state=State.UNFINISHED, engine="vllm"),
    )
    for width in (20, 80, 300):
        lines = printed(runs, width=width).splitlines()
        assert len(lines) == 3
        assert lines[1].split() == [
            "audit-20261115-084000",
            "2026-11-15",
            "08:40",
            "FAIL",
            "0.152",
            "semantic/raw-logprobs",
            "vllm",
            runs[0].model,
        ]
        assert lines[2].split() == ["short", "2026-11-15", "08:40", "unfinished", "–", "–", "vllm", "–"]
        # Columns stand below each other, up to the last.
        assert (
            len({line.index(word) for line, word in zip(lines, ("engine", "vllm", "vllm"), strict=True)}) == 1
        )
        assert all(line == line.rstrip() for line in lines)


def test_what_cannot_be_read_says_why() -> None:
    text = printed((summary("torn", state=State.UNREADABLE, problem="verdict.json\x1b[2J is torn"),))
    assert text.splitlines()[1].split()[:4] == ["torn", "2026-11-15", "08:40", "unreadable"]
    assert text.splitlines()[2] == "torn: verdict.json␛[2J is torn"


def test_verdicts_have_their_colours() -> None:
    text = printed((summary("a", verdict=Outcome.PASS), summary("b", verdict=Outcome.FAIL)), terminal=True)
    assert "\x1b[32mPASS" in text
    assert "\x1b[31mFAIL" in text


def test_runs_of_a_directory(runs: dict[str, Path]) -> None:
    lines = printed(list_runs(runs["passing"].parent)).splitlines()
    assert len(lines) == 1 + len(runs)
    assert all(character.isprintable() for line in lines for character in line)


def test_two_runs_side_by_side(runs: dict[str, Path]) -> None:
    text = printed(compare_runs(runs["passing"], runs["failing"]), width=120)
    lines = text.splitlines()
    assert lines[0] == "passing → failing"
    # Fingerprints first, then what came out, then numbers, then the sentence.
    order = [
        "semantic:",
        "questions:",
        "numeric:",
        "deployment:",
        "outcome",
        "probes with",
        "numbers",
        "What both runs state",
    ]
    places = [text.index(f"\n{heading}") for heading in order]
    assert places == sorted(places)
    assert text.count("no difference") == 4
    rows = [line.split() for line in lines]
    assert ["verdict", "PASS", "FAIL"] in rows
    assert ["semantic/raw-logprobs", "–", "fails"] in rows
    assert ["parity", "pass", "fail"] in rows
    assert ["floor", "0.0041", "0.0041", "="] in rows
    (mean,) = [row for row in rows if row[:2] == ["mean", "|Δ|"]]
    assert mean[-2:] == ["×", "12.2"]


def test_answers_to_the_same_requests_stand_behind_the_numbers(runs: dict[str, Path]) -> None:
    answers = SameRequests(samples=2, same_tokens=1, shared_tokens=9, differing=0, largest=0.0)
    found = msgspec.structs.replace(compare_runs(runs["passing"], runs["failing"]), answers=answers)
    text = printed(found, width=120)
    assert text.index("\nnumbers") < text.index("\nanswers to the same requests: 1 of 2 have")
    assert "answers to" not in printed(msgspec.structs.replace(found, answers=None))


def test_only_what_there_is_gets_a_table(runs: dict[str, Path]) -> None:
    text = printed(compare_runs(runs["inconclusive"], runs["inconclusive"]))
    assert "numbers\n" not in text
    assert "probes" not in text
    assert "outcome" in text


def test_facts_stand_in_their_part_and_none_acts_on_the_terminal(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("passing", "hostile"):
        (tmp_path / f"{name}\x1b[31m").mkdir()
        write_verdict(tmp_path / f"{name}\x1b[31m", read_verdict(runs[name]))
    text = printed(
        compare_runs(*(tmp_path / f"{name}\x1b[31m" for name in ("passing", "hostile"))), width=400
    )
    assert text.startswith("passing␛[31m → hostile␛[31m")
    semantic, numeric = text.index("semantic: what the numbers mean"), text.index("numeric: how")
    assert semantic < text.index("logprobs_mode") < numeric
    assert text.count("no difference") == 0
    assert not [character for character in text if not character.isprintable() and character != "\n"]


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (0.5, 1.0, "× 2"),
        (0.0, 1.0, "–"),
        (None, 1.0, "–"),
        (1.0, None, "–"),
        (1.0, 1.0, "="),
        (1.0, 0.0, "× 0"),
    ],
)
def test_changes_of_numbers(
    runs: dict[str, Path], before: float | None, after: float | None, change: str
) -> None:
    same = compare_runs(runs["inconclusive"], runs["inconclusive"])
    number = Change(name="k3", before=before, after=after)
    text = printed(msgspec.structs.replace(same, numbers=(number,)))
    (line,) = [line for line in text.splitlines() if line.startswith("k3")]
    assert line.rstrip().endswith(f"  {change}")
