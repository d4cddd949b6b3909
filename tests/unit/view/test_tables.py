import io
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from zerodrift.records.directory import read_verdict, write_verdict
from zerodrift.records.verdict import Outcome
from zerodrift.view.comparison import Change, Comparison, FactChange, Part, SameRequests, compare_runs
from zerodrift.view.runs import RunSummary, State, list_runs
from zerodrift.view.tables import _EXPLANATIONS, explain, print_comparison, print_runs

MOMENT = datetime(2026, 11, 15, 3, 10, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader five and a half hours east of UTC, where no time can be right by chance."""
    monkeypatch.setenv("TZ", "IST-5:30")
    time.tzset()
    yield
    monkeypatch.undo()
    assert os.environ.get("TZ") != "IST-5:30"
    time.tzset()


def printed(what: Any, *, width: int = 80, terminal: bool = False) -> str:
    file, colours = io.StringIO(), "standard" if terminal else None
    console = Console(file=file, width=width, force_terminal=terminal, color_system=colours)  # type: ignore[arg-type]
    (print_runs if isinstance(what, tuple) else print_comparison)(what, console)
    return file.getvalue()


def summary(name: str, **more: Any) -> RunSummary:
    return RunSummary(name=name, when=MOMENT, **{"state": State.FINISHED, **more})


@pytest.mark.parametrize("width", [20, 80, 300])
def test_a_run_is_one_line_however_narrow_the_terminal(width: int) -> None:
    cause, model = "semantic/raw-logprobs", "/checkpoints/" + "deep/" * 40
    found = {"verdict": Outcome.FAIL, "cause": cause, "engine": "vllm", "model": model, "mean": 0.152}
    runs = summary("audit-1", **found), summary("short", state=State.UNFINISHED, engine="vllm")
    heading, first, second = printed(runs, width=width).splitlines()
    assert first.split() == ["audit-1", "2026-11-15", "08:40", "FAIL", "0.152", cause, "vllm", model]
    assert second.split() == ["short", "2026-11-15", "08:40", "unfinished", "–", "–", "vllm", "–"]
    # Columns stand below each other, up to the last.
    assert heading.index("engine") == first.index("vllm") == second.index("vllm")
    assert all(line == line.rstrip() for line in (heading, first, second))


def test_a_list_fits_the_terminal_of_those_who_look_at_it() -> None:
    found = {"verdict": Outcome.INCONCLUSIVE, "cause": "semantic/sampling-bias", "engine": "recorded"}
    runs = (
        summary("b-llama-padded-leftprompt.jsonl.", model="testbed:llama", mean=1.24, **found),
        summary("a"),
    )

    def lines(width: int) -> list[str]:
        file = io.StringIO()
        print_runs(runs, Console(file=file, width=width), fit=True)
        return file.getvalue().splitlines()

    narrow = lines(80)
    assert max(map(len, narrow)) <= 80
    assert len(narrow) == 6
    assert narrow[2].split()[0] == runs[0].name
    assert narrow[3].split() == ["semantic/sampling-bias", "recorded", "testbed:llama"]
    assert len(lines(200)) == 3


def test_what_cannot_be_read_says_why_and_verdicts_have_their_colours(runs: dict[str, Path]) -> None:
    text = printed((summary("torn", state=State.UNREADABLE, problem="verdict.json\x1b[2J is torn"),))
    assert text.splitlines()[1].split()[3] == "unreadable"
    assert text.splitlines()[2] == "torn: verdict.json␛[2J is torn"
    text = printed((summary("a", verdict=Outcome.PASS), summary("b", verdict=Outcome.FAIL)), terminal=True)
    assert "\x1b[32mPASS" in text
    assert "\x1b[31mFAIL" in text
    lines = printed(list_runs(runs["passing"].parent)).splitlines()
    assert len(lines) == 1 + len(runs)
    assert all(line.isprintable() for line in lines)


def test_two_runs_side_by_side(runs: dict[str, Path]) -> None:
    answers = SameRequests(samples=2, same_tokens=1, shared_tokens=9, differing=0, largest=0.0, mean=0.0)
    found = msgspec.structs.replace(compare_runs(runs["passing"], runs["failing"]), answers=answers)
    text = printed(found, width=120)
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
        "answers to",
    ]
    places = [text.index(f"\n{heading}") for heading in [*order, "What both runs state"]]
    assert places == sorted(places)
    assert text.count("no difference") == 4
    rows = [line.split() for line in lines]
    for row in (
        "verdict PASS FAIL",
        "semantic/raw-logprobs – fails",
        "parity pass fail",
        "floor 0.0041 0.0041 =",
    ):
        assert row.split() in rows
    (mean,) = [row for row in rows if row[:2] == ["mean", "|Δ|"]]
    assert mean[-2:] == ["×", "12.2"]
    nothing = printed(compare_runs(runs["inconclusive"], runs["inconclusive"]))
    assert not [each for each in ("numbers\n", "probes", "answers to") if each in nothing]


def test_facts_stand_in_their_part_and_none_acts_on_the_terminal(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    names = [tmp_path / f"{name}\x1b[31m" for name in ("passing", "hostile")]
    for path in names:
        path.mkdir()
        write_verdict(path, read_verdict(runs[path.name.partition("\x1b")[0]]))
    text = printed(compare_runs(*names), width=400)
    assert text.startswith("passing␛[31m → hostile␛[31m")
    assert text.index("semantic: what the") < text.index("logprobs_mode") < text.index("numeric: how")
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
def test_changes_of_numbers(before: float | None, after: float | None, change: str) -> None:
    text = printed(comparison(mean=(before, after)))
    (line,) = [line for line in text.splitlines() if line.startswith("mean |Δ|")]
    assert line.rstrip().endswith(f"  {change}")


def fact(part: Part, before: str | None = "a", after: str | None = "b") -> FactChange:
    return FactChange(part=part, side="engine", name="dtype", before=before, after=after)


def comparison(*facts: FactChange, mean: tuple[float | None, float | None] = (0.01, 0.2)) -> Comparison:
    numbers = (Change(name="mean |Δ|", before=mean[0], after=mean[1]),)
    verdicts = {"verdict_before": Outcome.PASS, "verdict_after": Outcome.PASS}
    return Comparison(before="1", after="2", facts=facts, numbers=numbers, causes=(), probes=(), **verdicts)


@pytest.mark.parametrize("part", Part)
def test_the_part_that_explains_most_is_named_alone(part: Part) -> None:
    parts = list(Part)
    assert explain(comparison(*map(fact, parts[parts.index(part) :]))) == _EXPLANATIONS[part]
    alike = comparison(fact(part), mean=(0.01, 0.01))
    assert explain(alike) not in _EXPLANATIONS.values(), "nothing was measured otherwise"


@pytest.mark.parametrize("stated", [("a", None), (None, "b")])
def test_a_fact_that_one_run_alone_states_explains_nothing(stated: tuple[str | None, str | None]) -> None:
    assert explain(comparison(fact(Part.SEMANTIC, *stated))) == explain(comparison())
    assert explain(comparison(fact(Part.QUESTIONS, *stated))) == _EXPLANATIONS[Part.QUESTIONS]
    assert explain(comparison()) != explain(comparison(mean=(0.01, 0.01)))


@pytest.mark.parametrize("parts", [(), (Part.NUMERIC, Part.DEPLOYMENT), (Part.DEPLOYMENT,)])
def test_what_a_run_proved_is_named_beside_facts_that_explain_rounding(parts: tuple[Part, ...]) -> None:
    """0.8.5 and 0.18.1 of vLLM differ in their number alone, as far as both state it: that is not the reason."""
    plain = comparison(*map(fact, parts))
    raw = "semantic/raw-logprobs"
    found = msgspec.structs.replace(plain, causes=(Change(name=raw, before=None, after="fails"),))
    gone = msgspec.structs.replace(plain, causes=(Change(name=raw, before="fails", after=None),))
    listed = msgspec.structs.replace(plain, causes=(Change(name=raw, before=None, after="listed"),))
    assert raw in explain(found)
    assert raw in explain(gone)
    assert len({explain(each) for each in (plain, found, gone)}) == 3
    assert explain(listed) == explain(plain)
    semantic = msgspec.structs.replace(found, facts=(fact(Part.SEMANTIC), *found.facts))
    assert explain(semantic) == _EXPLANATIONS[Part.SEMANTIC]


def test_a_change_of_the_sampler_does_not_point_at_the_weights() -> None:
    drawn = (Change(name="sampling", before="pass", after="fail"),)
    biased = (Change(name="semantic/sampling-bias", before=None, after="fails"),)
    worse = msgspec.structs.replace(comparison(), verdict_after=Outcome.FAIL, probes=drawn)
    named = msgspec.structs.replace(worse, causes=biased)
    assert "semantic/sampling-bias" in explain(named)
    for told in (explain(named), explain(worse)):
        assert told != explain(comparison())
        assert "weights" not in told
    both = (*drawn, Change(name="parity", before="pass", after="fail"))
    assert explain(msgspec.structs.replace(comparison(), probes=both)) == explain(comparison())
