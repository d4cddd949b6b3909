import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from zerodrift.records.evidence import Power
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.view.run_directory import read
from zerodrift.view.text import print_verdict


def printed(
    record: VerdictRecord, directory: Path | None = None, *, width: int = 80, terminal: bool = False
) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system="standard" if terminal else None
    )
    print_verdict(record, console, directory)
    return file.getvalue()


def record_of(runs: dict[str, Path], name: str) -> VerdictRecord:
    return read(runs[name]).record


def test_a_failure_in_a_terminal(runs: dict[str, Path]) -> None:
    text = printed(record_of(runs, "failing"), width=100)
    lines = text.splitlines()
    assert lines[0] == "FAIL  Not the same policy"
    for part in (
        "guilty  The engine (vllm)",
        "cause   semantic/raw-logprobs",
        "why     The engine reports logprobs",
        "type this:\n    --logprobs-mode processed_logprobs\n",
        "and for weights/stale-prefix-cache:\n    POST /reset_prefix_cache",
        "97.3%",
        "listed",
        "8.0%",
        "inconclusive",
        "token ESS 96.6%",
        "sequence ESS",
        "tokens 2,794",
    ):
        assert part in text
    (mean,) = [line.split() for line in lines if line.startswith("mean |Δ|")]
    assert mean == ["mean", "|Δ|", "0.152", "0.0041", "0.03"]
    (k3,) = [line.split() for line in lines if line.startswith("k3")]
    assert k3[2] == "–"


def test_a_pass_asks_for_nothing(runs: dict[str, Path]) -> None:
    text = printed(record_of(runs, "passing"))
    assert text.startswith("PASS  The same policy")
    assert "type this" not in text
    assert "vacuous" in text
    assert "\ncause   semantic" not in text


def test_without_a_verdict_the_command_is_repeated(runs: dict[str, Path], examples: Any) -> None:
    text = printed(record_of(runs, "inconclusive"))
    assert text.startswith("INCONCLUSIVE  Not judged")
    assert f"then:\n    {examples.REPRODUCE}\n" in text
    assert "measured" not in text
    assert "ESS" not in text


def test_an_empty_record_is_still_an_answer(examples: Any) -> None:
    record = examples.verdict(Outcome.INCONCLUSIVE, guilty="unknown", says="no answer", reproduce="")
    assert printed(record).splitlines()[0] == "INCONCLUSIVE  Not judged"
    assert "then:" not in printed(record)
    assert "probe" not in printed(record)


def test_a_fix_is_never_wrapped(examples: Any) -> None:
    fix = '--hf-overrides \'{"head_dtype":"float32"}\' ' + " ".join(
        f"--flag-{i} [red]x[/red]" for i in range(20)
    )
    causes = (examples.cause("semantic/bos", 1.0, "", fix=fix),)
    record = examples.verdict(Outcome.FAIL, guilty="engine", says="", causes=causes)
    for width in (20, 80, 200):
        assert f"    {fix}" in printed(record, width=width).splitlines()


def test_the_smallest_case_is_a_command(examples: Any) -> None:
    command = "zerodrift audit --case " + "long/" * 30 + "case.json"
    record = examples.verdict(
        Outcome.FAIL,
        guilty="engine",
        says="",
        smallest="prompt of 1 token, alone",
        reproduce_smallest=command,
    )
    text = printed(record)
    assert "smallest case, prompt of 1 token, alone:" in text
    assert f"    {command}\n" in text, "never wrapped"
    assert "smallest case" not in printed(examples.verdict(Outcome.FAIL, guilty="engine", says=""))


def test_paths_stand_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    directory = tmp_path / ("long-name-" * 12)
    directory.mkdir()
    record = record_of(runs, "passing")
    assert printed(record, directory).endswith(f"run directory:\n    {directory}\n\n")
    (directory / "report.html").touch()
    assert printed(record, directory).endswith(f"report:\n    {directory / 'report.html'}\n\n")


@pytest.mark.parametrize(("name", "code"), [("passing", "32"), ("failing", "31"), ("inconclusive", "33")])
def test_the_verdict_has_its_colour(runs: dict[str, Path], name: str, code: str) -> None:
    assert printed(record_of(runs, name), terminal=True).startswith(f"\x1b[1;{code}m")


def test_no_control_character_of_a_model_reaches_the_terminal(runs: dict[str, Path]) -> None:
    record = record_of(runs, "hostile")
    hostile = Path("runs/\x1b[31mred")
    text = printed(record, hostile, width=300)
    assert "owned" in text
    assert not [character for character in text if not character.isprintable() and character != "\n"]
    assert "␛[2J␛]0;owned␇" in text
    assert "runs/␛[31mred" in text


def test_markup_in_a_message_is_text(examples: Any) -> None:
    says = "expected [bold]tokens[/bold] and :smile: at [/link]"
    record = examples.verdict(
        Outcome.FAIL,
        guilty="engine",
        says=says,
        causes=(examples.cause("semantic/bos", 1.0, says, fix=says),),
        probes=(examples.probe("a[b]", Outcome.FAIL, says),),
    )
    assert printed(record, width=200).count(says) == 4
    assert "a[b]" in printed(record)


def test_a_record_survives_its_trip_to_the_disk(runs: dict[str, Path]) -> None:
    record = record_of(runs, "failing")
    again = msgspec.json.decode(msgspec.json.encode(record), type=VerdictRecord)
    assert printed(again) == printed(record)


@pytest.mark.parametrize("name", ["failing", "passing", "inconclusive"])
def test_every_verdict_says_what_would_have_been_seen(runs: dict[str, Path], name: str) -> None:
    record = record_of(runs, name)
    silent = printed(record)
    assert "nothing was drawn" in silent
    line = Power(name="ids never drawn", says="ids never drawn: from \x1b[1m 1 %", seen_from=0.01)
    told = printed(msgspec.structs.replace(record, power=(line,)))
    assert "ids never drawn: from" in told
    assert "\x1b" not in told, "a terminal obeys what it prints"
    assert "nothing was drawn" not in told
