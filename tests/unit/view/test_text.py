import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from zerodrift.core.request import Prompt, Request
from zerodrift.records.case import Case
from zerodrift.records.evidence import Power
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.view.run_directory import read
from zerodrift.view.text import print_replayed, print_verdict


def printed(
    record: VerdictRecord, directory: Path | None = None, *, width: int = 80, terminal: bool = False
) -> str:
    file, colours = io.StringIO(), "standard" if terminal else None
    console = Console(file=file, width=width, force_terminal=terminal, color_system=colours)  # type: ignore[arg-type]
    print_verdict(record, console, directory)
    return file.getvalue()


def replayed(tokens: list[tuple[int, float, float]], problem: str = "") -> str:
    file, case = io.StringIO(), Case(requests=(Request(Prompt((5, 6))),), limit=1e-3)
    print_replayed(case, tokens, problem, Console(file=file, width=100))
    return file.getvalue()


def test_a_failure_in_a_terminal(runs: dict[str, Path]) -> None:
    text = printed(read(runs["failing"]).record, width=100)
    assert text.startswith("FAIL  Not the same policy\n")
    for part in (
        "guilty  The engine (vllm)",
        "cause   semantic/raw-logprobs",
        "why     The engine reports logprobs",
        "type this:\n    --logprobs-mode processed_logprobs\n",
        "and for weights/stale-prefix-cache:\n    POST /reset_prefix_cache",
        "97.3%",
        "8.0%",
        "token ESS 96.6%",
        "tokens 2,794",
    ):
        assert part in text
    rows = [line.split() for line in text.splitlines()]
    assert ["mean", "|Δ|", "0.152", "0.0041", "0.03"] in rows
    assert [row[2] for row in rows if row[:1] == ["k3"]] == ["–"]


def test_a_pass_asks_for_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    record = read(runs["passing"]).record
    text = printed(record)
    assert text.startswith("PASS  The same policy")
    assert "vacuous" in text
    assert "type this" not in text
    directory = tmp_path / ("long-name-" * 12)
    directory.mkdir()
    assert printed(record, directory).endswith(f"run directory:\n    {directory}\n\n")
    (directory / "report.html").touch()
    assert printed(record, directory).endswith(f"report:\n    {directory / 'report.html'}\n\n")


def test_without_a_verdict_the_command_is_repeated(runs: dict[str, Path], examples: Any) -> None:
    text = printed(read(runs["inconclusive"]).record)
    assert text.startswith("INCONCLUSIVE  Not judged")
    assert f"then:\n    {examples.REPRODUCE}\n" in text
    assert "ESS" not in text
    empty = printed(examples.verdict(Outcome.INCONCLUSIVE, reproduce=""))
    assert empty.startswith("INCONCLUSIVE  Not judged")
    assert "then:" not in empty


@pytest.mark.parametrize("width", [20, 80, 200])
def test_what_is_to_be_typed_is_never_wrapped(examples: Any, width: int) -> None:
    fix = " ".join(f"--flag-{i} [red]x[/red]" for i in range(20))
    command = "zerodrift audit --case " + "long/" * 30 + "case.json"
    record = examples.verdict(
        Outcome.FAIL,
        causes=(examples.cause("semantic/bos", 1.0, "", fix=fix),),
        smallest="prompt of 1 token, alone",
        reproduce_smallest=command,
    )
    assert {f"    {fix}", f"    {command}"} <= set(printed(record, width=width).splitlines())


@pytest.mark.parametrize(("name", "code"), [("passing", "32"), ("failing", "31"), ("inconclusive", "33")])
def test_the_verdict_has_its_colour(runs: dict[str, Path], name: str, code: str) -> None:
    assert printed(read(runs[name]).record, terminal=True).startswith(f"\x1b[1;{code}m")


def test_no_text_of_a_model_acts_on_the_terminal(runs: dict[str, Path], examples: Any) -> None:
    text = printed(read(runs["hostile"]).record, Path("runs/\x1b[31mred"), width=300)
    assert not [character for character in text if not character.isprintable() and character != "\n"]
    assert "␛[2J␛]0;owned␇" in text
    assert "runs/␛[31mred" in text
    says = "expected [bold]tokens[/bold] and :smile: at [/link]"
    causes = (examples.cause("semantic/bos", 1.0, says, fix=says),)
    probes = (examples.probe("a[b]", Outcome.FAIL, says),)
    record = examples.verdict(Outcome.FAIL, message=says, causes=causes, probes=probes)
    assert printed(record, width=200).count(says) == 4
    assert "\x1b" not in replayed([], "the engine said \x1b[2J")


def test_each_token_of_a_case_is_right_or_wrong() -> None:
    text = replayed([(7, -1.0, -1.0000001), (8, -1.0, -1.5), (9, -1.0, float("-inf"))])
    assert "prompt [5, 6]" in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:1] in "789"]
    assert [row[-1] for row in rows] == ["right", "wrong", "wrong"]
    assert rows[1][:4] == ["8", "-1.000000", "-1.500000", "-0.5"]


@pytest.mark.parametrize("name", ["failing", "passing", "inconclusive"])
def test_every_verdict_says_what_would_have_been_seen(runs: dict[str, Path], name: str) -> None:
    record = read(runs[name]).record
    silent = printed(record)
    assert "nothing was drawn" in silent
    line = Power(name="ids never drawn", message="ids never drawn: from \x1b[1m 1 %", seen_from=0.01)
    told = printed(msgspec.structs.replace(record, power=(line,)))
    assert "ids never drawn: from" in told
    assert "\x1b" not in told, "a terminal obeys what it prints"
    assert "nothing was drawn" not in told


def test_lines_of_power_are_wrapped_below_each_other(examples: Any) -> None:
    power = (Power(name="lower temperature", message="from ×0.84 " * 20, seen_from=0.84),)
    lines = printed(examples.verdict(Outcome.PASS, power=power), width=40).splitlines()
    long = [line for line in lines if "×0.84" in line]
    assert len(long) > 1
    assert all(line.startswith("    from") and len(line) <= 40 for line in long)


def test_a_pass_says_first_what_it_is_about(examples: Any) -> None:
    power = (Power(name="lower temperature", message="lower temperature: from ×0.84", seen_from=0.84),)
    passed = examples.verdict(Outcome.PASS, metrics={"tokens": 1017.0}, power=power)
    top = " ".join(printed(passed).split("\n\n")[0].split())
    assert "scope 1,017 tokens judged; would have been seen: lower temperature from ×0.84" in top
    failed = examples.verdict(Outcome.FAIL, metrics={"tokens": 1017.0}, power=power)
    assert "scope" not in printed(failed).split("\n\n")[0]


def test_what_would_not_have_been_seen_does_not_stand_behind_what_would(examples: Any) -> None:
    power = (
        Power(name="lower temperature", message="lower temperature: would not be seen"),
        Power(name="higher temperature", message="higher temperature: from ×1.94", seen_from=1.94),
    )
    passed = examples.verdict(Outcome.PASS, metrics={"tokens": 932.0}, power=power)
    top = " ".join(printed(passed).split("\n\n")[0].split())
    assert (
        "932 tokens judged; would have been seen: higher temperature from ×1.94; "
        "would not have been seen: lower temperature" in top
    )
