"""What the report says; what holds for every page is in test_page.py."""

import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from zerodrift.records.directory import write_verdict
from zerodrift.records.verdict import Outcome
from zerodrift.view.report import render
from zerodrift.view.run_directory import read
from zerodrift.view.text import print_verdict
from zerodrift.view.verdict import next_step


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path]) -> dict[str, str]:
    return {name: render(directory) for name, directory in runs.items()}


def first_screen(page: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", page[page.index("<header>") : page.index("</header>")]))


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("failing", ["FAIL", "Not the same policy", "The engine (vllm)", "semantic/raw-logprobs"]),
        ("failing", ["--logprobs-mode processed_logprobs", "1 more cause fails this audit"]),
        ("passing", ["PASS", "The same policy", "Neither side", "Nothing.", "1 known effect below the gate"]),
        ("inconclusive", ["INCONCLUSIVE", "Not judged", "nothing answers at", "--seed 7", "Not measured"]),
    ],
)
def test_the_first_screen_answers(pages: dict[str, str], name: str, answers: list[str]) -> None:
    text = first_screen(pages[name])
    assert not [answer for answer in answers if answer not in text]
    assert "known effect" not in first_screen(pages["exact"])


def test_a_failure_without_a_cause_and_one_with_many(examples: Any, tmp_path: Path) -> None:
    page = render(examples.write(tmp_path, examples.verdict(Outcome.FAIL), None))
    assert "No fix is known" in first_screen(page)
    assert "No probe was asked" in page
    names = ("weights/stale", "semantic/bos", "semantic/eos")
    causes = tuple(examples.cause(name, 1.0, "") for name in names)
    page = render(examples.write(tmp_path, examples.verdict(Outcome.FAIL, causes=causes), None))
    assert "2 more causes fail this audit: see their fixes" in first_screen(page)


@pytest.mark.parametrize("name", ["weights/stale", "semantic/raw-logprobs"])
def test_page_and_terminal_introduce_the_fix_by_the_same_words(
    examples: Any, tmp_path: Path, name: str
) -> None:
    record = examples.verdict(Outcome.FAIL, causes=(examples.cause(name, 1.0, ""),))
    told = io.StringIO()
    print_verdict(record, Console(file=told, width=200), None)
    step = next_step(record)
    assert step is not None
    assert f"{step[0]}:\n    {step[1]}\n" in told.getvalue()
    page = render(examples.write(tmp_path, record, None))
    assert f"<dt>{step[0].capitalize()}</dt>" in page


def test_every_figure_has_its_place(pages: dict[str, str]) -> None:
    (held,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', pages["failing"])
    figures = json.loads(held)
    assert len(figures) == 4
    assert all(f'id="plot-{key}"' in pages["failing"] for key in figures)
    assert 'id="drift"' not in pages["inconclusive"]
    assert len(pages["inconclusive"]) < 60_000


def test_impossible_tokens_are_counted(pages: dict[str, str], examples: Any, tmp_path: Path) -> None:
    assert "1 sampled token is impossible" in pages["hostile"]
    columns = examples.draw(sequences=2, length=12)
    columns["contracted"][:] = float("-inf")
    page = render(examples.write(tmp_path, examples.verdict(Outcome.FAIL), columns))
    for says in ("tokens are impossible", "no finite Δ to draw", "No ratio can be made of these numbers"):
        assert says in page
    assert len(page) < 100_000, "five megabytes of Plotly that draw nothing"


def test_equal_tokens_are_said_to_be_equal(pages: dict[str, str]) -> None:
    for says in ("Every token is equal to the last bit", "No token differs", "did not record its command"):
        assert says in pages["exact"]


def test_differing_facts_are_marked_and_ratios_come_from_the_tokens(
    pages: dict[str, str], examples: Any
) -> None:
    # logprobs_mode, generation_config; attention_backend, dtype
    assert pages["failing"].count('<tr class="differs">') == 4
    assert pages["failing"].count("2 facts differ") == 2
    assert f"{100 * examples.metrics(examples.raw(examples.draw()))['token_ess']:.1f}%" in pages["failing"]


def test_commands_are_whole_and_a_long_config_is_cut_with_a_note(examples: Any, tmp_path: Path) -> None:
    command = "zerodrift audit " + " ".join(f"--set a.b{i}={i}" for i in range(200))
    alone = {"smallest": "prompt of <b>1</b> token", "reproduce_smallest": "zerodrift audit --case case.json"}
    record = examples.verdict(Outcome.PASS, reproduce=command, **alone)
    directory = examples.write(tmp_path, record, None)
    (directory / "config.yaml").write_text("key: value\n" * 20_000)
    page = render(directory)
    for says in (
        command,
        "220,000 characters; the file has them all",
        "&lt;b&gt;1&lt;/b&gt;",
        "--case case.json",
    ):
        assert says in page
    (directory / "config.yaml").unlink()
    (directory / "environment.json").unlink()
    assert "<details>" not in render(directory)


def test_of_recorded_rollouts_the_page_says_who_in_a_sentence_and_since_when(
    examples: Any, tmp_path: Path, pages: dict[str, str]
) -> None:
    run = examples.RUNS["failing"](tmp_path / "run")
    words = {"side": "dump: the numbers may be right & late", "since": "step 7: 8 of 8 rollouts"}
    write_verdict(run, msgspec.structs.replace(read(run).record, guilty="dump", **words))
    page = render(run)
    for says in (
        "<strong><bdi>dump</bdi></strong>",
        "<bdi>the numbers may be right &amp; late</bdi>",
        "<dt>Since when?</dt>",
        "<bdi>step 7: 8 of 8 rollouts</bdi>",
    ):
        assert says in page
    assert "Since when?" not in pages["failing"], "an audit is of now"


@pytest.mark.parametrize(("guilty", "trainer"), [("trainer", True), ("engine", False)])
def test_numbers_of_a_guilty_trainer_are_not_called_the_engine_s(
    examples: Any, tmp_path: Path, guilty: str, trainer: bool
) -> None:
    """The table has the trainer's, the figures the engine's, and each says so."""
    run = examples.RUNS["failing"](tmp_path / "run")
    write_verdict(run, msgspec.structs.replace(read(run).record, guilty=guilty))
    page = render(run)
    assert ("log π(trainer)" in page) is trainer
    assert ("the <strong>engine's</strong> Δ" in page) is trainer


def test_a_cause_in_the_trainer_s_numbers_is_not_told_as_the_engine_s(examples: Any, tmp_path: Path) -> None:
    run = examples.RUNS["failing"](tmp_path / "run")
    record = read(run).record
    (cause, *others) = record.causes
    assert "<p>The engine" in render(run)
    found = tuple(msgspec.structs.replace(each, found_by="trainer") for each in (cause, *others))
    write_verdict(run, msgspec.structs.replace(record, causes=found, guilty="trainer"))
    page = render(run)
    assert "<p>The engine" not in page
    assert "Seen in the trainer's numbers." in page
