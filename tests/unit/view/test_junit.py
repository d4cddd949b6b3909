from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from zerodrift.records.directory import read_verdict
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.view.junit import junit, write_junit


def suite_of(record: VerdictRecord) -> ElementTree.Element:
    root = ElementTree.fromstring(junit(record))
    (suite,) = root
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    return suite


def ends(suite: ElementTree.Element) -> dict[str, str | None]:
    return {str(case.get("name")): next((end.tag for end in case), None) for case in suite.iter("testcase")}


def test_one_case_per_probe(runs: dict[str, Path]) -> None:
    suite = suite_of(read_verdict(runs["failing"]))
    assert ends(suite) == {
        "contract": None,
        "parity": "failure",
        "sampling": None,
        "cache": "skipped",
        "weight-sync": "failure",
    }
    counted = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")}
    assert counted == {"tests": "5", "failures": "2", "errors": "0", "skipped": "1", "time": "6.250"}
    case = suite.findall("testcase")[0]
    assert (case.get("classname"), case.get("time")) == ("zerodrift.audit.vllm", "1.250")


def test_a_failure_carries_evidence_cause_and_fix(runs: dict[str, Path]) -> None:
    suite = suite_of(read_verdict(runs["failing"]))
    parity, sync = suite.findall("testcase/failure")
    assert str(parity.get("message")).startswith("mean |Δ| 0.152 > 0.03")
    assert {"tokens = 2,794", "fix: --logprobs-mode processed_logprobs"} <= set(str(parity.text).splitlines())
    assert {"slope = 0.9998"} <= set(str(sync.text).splitlines())
    assert "weights/stale-prefix-cache" in str(sync.text)
    assert b"head-precision" not in junit(read_verdict(runs["failing"])), "what is only listed fails nothing"


def test_a_required_question_without_an_answer_is_an_error(runs: dict[str, Path]) -> None:
    suite = suite_of(read_verdict(runs["inconclusive"]))
    assert ends(suite) == {"contract": "error", "parity": "error"}
    assert set(ends(suite_of(read_verdict(runs["passing"]))).values()) == {None, "skipped"}


@pytest.mark.parametrize(
    ("outcome", "statuses", "end"),
    [
        (Outcome.PASS, (Outcome.PASS,), None),
        (Outcome.FAIL, (Outcome.PASS,), "failure"),
        (Outcome.FAIL, (Outcome.INCONCLUSIVE,), "failure"),
        (Outcome.FAIL, (Outcome.FAIL,), None),
        (Outcome.INCONCLUSIVE, (Outcome.PASS,), "error"),
        (Outcome.INCONCLUSIVE, (), "error"),
        (Outcome.INCONCLUSIVE, (Outcome.INCONCLUSIVE,), None),
    ],
)
def test_it_is_green_exactly_where_the_verdict_is_pass(
    examples: Any, outcome: Outcome, statuses: tuple[Outcome, ...], end: str | None
) -> None:
    """A verdict that no probe carries, such as that of a gating cause of a passed probe, has a case of its own."""
    probes = tuple(examples.probe("parity", status, "so", required=True) for status in statuses)
    causes = (examples.cause("semantic/bos", 1.0, "seen twice"),) if outcome is Outcome.FAIL else ()
    record = examples.verdict(
        outcome, guilty="engine", message="the conclusion", probes=probes, causes=causes
    )
    suite = suite_of(record)
    assert ends(suite).get("verdict") == end
    if end is not None:
        own = suite.find(f"testcase[@name='verdict']/{end}")
        assert own is not None
        assert own.get("message") == "the conclusion"
        assert ("fix: send" in str(own.text)) is (outcome is Outcome.FAIL)
    red = int(str(suite.get("failures"))) + int(str(suite.get("errors")))
    assert (red == 0) is (outcome is Outcome.PASS)
    assert suite.get("tests") == str(len(suite.findall("testcase")))


def test_hostile_text_is_text(runs: dict[str, Path], examples: Any) -> None:
    record = read_verdict(runs["hostile"])
    suite = suite_of(record)
    (case,) = suite.findall("testcase")
    assert "</script><script>" in str(case.get("name"))
    assert "␛[2J␛]0;owned␇" in str(case.get("name"))
    (failure,) = case
    assert "⟨U+202E⟩evil" in str(failure.get("message"))
    # Every code that XML 1.0 cannot hold, as itself and as it is seen.
    illegal = "".join(map(chr, [*range(9), 0xB, 0xC, *range(0xE, 0x20), 0xD800, 0xFFFE, 0xFFFF]))
    probe = examples.probe(illegal, Outcome.FAIL, illegal, evidence={illegal: illegal})
    changed = msgspec.structs.replace(record, probes=(probe,), model=illegal, message=illegal)
    name = str(suite_of(changed).findall("testcase")[0].get("name"))
    assert not set(name) & set(illegal)
    assert name.startswith("␀␁␂")
    assert name.endswith("⟨U+D800⟩⟨U+FFFE⟩⟨U+FFFF⟩")


def test_the_file_and_its_directory_are_made(runs: dict[str, Path], tmp_path: Path) -> None:
    path, record = tmp_path / "build" / "results" / "audit.xml", read_verdict(runs["failing"])
    write_junit(path, record)
    assert path.read_bytes() == junit(record)
    assert [file.name for file in path.parent.iterdir()] == ["audit.xml"]
