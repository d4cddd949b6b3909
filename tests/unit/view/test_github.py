import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerodrift.records.directory import read_verdict
from zerodrift.records.verdict import Outcome
from zerodrift.view.github import MOST_BYTES, SUMMARY, annotation, append_summary, cut, summary


def rendered(markdown: str) -> str:
    """Text without the escapes of CommonMark, for reading in a test."""
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", markdown)


def test_a_failure_says_what_to_type(runs: dict[str, Path]) -> None:
    text = summary(read_verdict(runs["failing"]))
    assert text.startswith("## ❌ FAIL: Not the same policy\n\n")
    assert "```\n--logprobs-mode processed_logprobs\n```\n" in text
    assert text.index("raw\\-logprobs") < text.index("```") < text.index("| probe | status | says |")
    assert "| parity | ❌ FAIL | mean |Δ| 0.152 > 0.03" in rendered(text)
    assert "| cache | ⚠️ INCONCLUSIVE | the engine failed" in rendered(text)
    assert "Guilty: The engine (vllm)." in rendered(text)
    # What is only listed needs no fix.
    assert "head" not in text


def test_a_pass_is_short(runs: dict[str, Path]) -> None:
    text = summary(read_verdict(runs["passing"]))
    assert text.startswith("## ✅ PASS: The same policy")
    assert "| cache | ⚠️ vacuous |" in text
    assert "Guilty" not in text
    assert text.count("```") == 2  # the command that repeats it


def test_without_probes_and_command_there_is_still_a_verdict(examples: Any) -> None:
    record = examples.verdict(Outcome.INCONCLUSIVE, guilty="unknown", says="no answer", reproduce="")
    text = summary(record)
    assert text.startswith("## ⚠️ INCONCLUSIVE: Not judged\n\nno answer\n\n")
    assert "|" not in text
    assert "`" not in text


def test_foreign_text_cannot_leave_its_place(examples: Any) -> None:
    attack = "| x |\n# owned <img src=x> [a](javascript:b) `c` **d** &amp; $e$ @f https://g ~~h~~ \\"
    fence = "run ```` this\n```\n# owned"
    record = examples.verdict(
        Outcome.FAIL,
        guilty="engine",
        says=attack,
        model=attack,
        causes=(examples.cause("semantic/bos", 1.0, attack, fix=fence),),
        probes=(examples.probe(attack, Outcome.FAIL, attack),),
        reproduce="",
    )
    text = summary(record)
    shown = attack.replace("\n", "␊")
    assert rendered(text).count(shown) == 5
    # Every sign that Markdown acts on has its backslash, wherever the attack stands.
    outside = re.sub(r"`````\n.*\n`````", "", text)
    assert re.sub(r"\\.", "", outside).count("<") == 0
    assert re.sub(r"\\.", "", outside).count("`") == 0
    (row,) = [line for line in text.splitlines() if line.startswith("| \\|")]
    assert len(re.findall(r"(?<!\\)\|", row.replace("\\\\", ""))) == 4
    # A fence is longer than any in the text, and the text is one line.
    assert "`````\nrun ```` this␊```␊# owned\n`````" in text


def test_the_summary_is_appended(runs: dict[str, Path], tmp_path: Path) -> None:
    record = read_verdict(runs["failing"])
    path = tmp_path / "summary.md"
    assert append_summary(record, {SUMMARY: str(path)})
    assert append_summary(record, {SUMMARY: str(path)})
    assert path.read_text(encoding="utf-8") == summary(record) * 2


@pytest.mark.parametrize("environment", [{}, {SUMMARY: ""}])
def test_elsewhere_nothing_is_written(runs: dict[str, Path], environment: dict[str, str]) -> None:
    assert not append_summary(read_verdict(runs["failing"]), environment)


def test_a_long_summary_is_cut_at_the_end_of_a_line(examples: Any, tmp_path: Path) -> None:
    probes = tuple(examples.probe(f"probe{number}", Outcome.PASS, "π" * 600) for number in range(1000))
    record = examples.verdict(Outcome.PASS, guilty="none", says="", probes=probes)
    path = tmp_path / "summary.md"
    path.write_text("from an earlier audit\n")
    append_summary(record, {SUMMARY: str(path)})
    content = path.read_bytes()
    assert MOST_BYTES - 2000 < len(content) <= MOST_BYTES
    *_, last, empty, note = content.decode().splitlines()
    assert last.startswith("| probe")
    assert last.endswith(" |")
    assert empty == ""
    assert note.startswith("… cut here")
    # Others find little room and then none, and the file stays below the limit.
    for _ in range(3):
        append_summary(record, {SUMMARY: str(path)})
    assert path.read_bytes().startswith(content)
    assert path.stat().st_size <= MOST_BYTES


def test_a_cut_keeps_whole_lines() -> None:
    text = "one\ntwö\nthree\n" * 20
    assert cut(text, len(text.encode())) == text.encode()
    for room in range(len(text.encode())):
        content = cut(text, room)
        assert len(content) <= room
        kept, _, note = content.decode().partition("\n… cut here")
        assert bool(note) is (room >= 71)  # its own length
        assert text.startswith(kept)
        assert kept == "" or kept.endswith("\n")


def test_an_annotation_where_the_audit_failed(runs: dict[str, Path], examples: Any) -> None:
    line = str(annotation(read_verdict(runs["failing"])))
    assert line.startswith(
        "::error title=zerodrift audit%3A semantic/raw-logprobs::The engine reports logprobs"
    )
    assert line.endswith(" Fix: --logprobs-mode processed_logprobs")
    assert annotation(read_verdict(runs["passing"])) is None
    assert annotation(read_verdict(runs["inconclusive"])) is None
    nameless = examples.verdict(Outcome.FAIL, guilty="engine", says="50% off")
    assert annotation(nameless) == "::error title=zerodrift audit::50%25 off"


def test_an_annotation_is_one_command(examples: Any) -> None:
    attack = "a,b::c\n::add-mask::x\r::stop-commands::y%0A"
    causes = (examples.cause("semantic/bos", 1.0, "", fix=attack),)
    line = str(annotation(examples.verdict(Outcome.FAIL, guilty="engine", says=attack, causes=causes)))
    assert line.isprintable()
    assert line.count("a,b::c␊::add-mask::x␍::stop-commands::y%250A") == 2
    named = msgspec.structs.replace(causes[0], cause="a,b:c")
    line = str(annotation(examples.verdict(Outcome.FAIL, guilty="engine", says="", causes=(named,))))
    assert line.startswith("::error title=zerodrift audit%3A a%2Cb%3Ac::")
