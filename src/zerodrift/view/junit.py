"""The verdict as a JUnit file, for whatever collects test results.

One test case per probe: failed probes are failures, required ones without an answer are errors, optional ones without
an answer are skipped. A collector sees nothing else, so the file is green exactly where the verdict is PASS: a verdict
that no probe carries gets a case of its own. Foreign text passes through `visible`, for XML 1.0 cannot hold controls at
all, not even escaped.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from zerodrift.records.codec import write_atomically
from zerodrift.records.verdict import Outcome, ProbeRecord, VerdictRecord
from zerodrift.view.notation import fact
from zerodrift.view.visible import LONGEST_TYPED, visible

SUITE = "zerodrift audit"
FAILURE, ERROR, SKIPPED = "failure", "error", "skipped"
_OF_VERDICT = {Outcome.PASS: None, Outcome.FAIL: FAILURE, Outcome.INCONCLUSIVE: ERROR}


def write_junit(path: Path, record: VerdictRecord) -> None:
    """The whole file or the old one; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, junit(record))


def junit(record: VerdictRecord) -> bytes:
    """A document with one test suite."""
    cases = list(_cases(record))
    counts = {kind: sum(case.find(kind) is not None for case in cases) for kind in (FAILURE, ERROR, SKIPPED)}
    seconds = sum(probe.seconds for probe in record.probes)
    totals = {
        "name": SUITE,
        "tests": str(len(cases)),
        "failures": str(counts[FAILURE]),
        "errors": str(counts[ERROR]),
        "time": f"{seconds:.3f}",
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", totals | {"skipped": str(counts[SKIPPED])})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(record):
        ElementTree.SubElement(properties, "property", name=name, value=visible(value, LONGEST_TYPED))
    suite.extend(cases)
    ElementTree.SubElement(suite, "system-out").text = "\n".join(_conclusion(record))
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _properties(record: VerdictRecord) -> Iterator[tuple[str, str]]:
    yield "verdict", record.verdict
    yield "model", record.model
    yield "precision", record.precision
    yield "engine", f"{record.engine.engine} {record.engine.digest}"
    yield "reference", f"{record.reference.engine} {record.reference.digest}"
    yield "reproduce", record.reproduce


def _cases(record: VerdictRecord) -> Iterator[ElementTree.Element]:
    ends = [_end(probe) for probe in record.probes]
    expected = _OF_VERDICT[record.verdict]
    if expected is not None and expected not in ends:
        case = _case(record, "verdict", 0.0)
        _put(case, expected, record.says, _conclusion(record))
        yield case
    for probe, end in zip(record.probes, ends, strict=True):
        case = _case(record, probe.name, probe.seconds)
        if end is not None:
            _put(case, end, probe.says, _evidence(probe, record))
        yield case


def _end(probe: ProbeRecord) -> str | None:
    if probe.status is Outcome.INCONCLUSIVE:
        return ERROR if probe.required else SKIPPED
    return FAILURE if probe.status is Outcome.FAIL else None


def _case(record: VerdictRecord, name: str, seconds: float) -> ElementTree.Element:
    classname = visible(f"zerodrift.audit.{record.engine.engine}")
    return ElementTree.Element("testcase", classname=classname, name=visible(name), time=f"{seconds:.3f}")


def _put(case: ElementTree.Element, kind: str, message: str, lines: list[str]) -> None:
    end = ElementTree.SubElement(case, kind, message=visible(message))
    if kind != SKIPPED:
        end.set("type", "gate" if kind == FAILURE else "inconclusive")
    end.text = "\n".join(lines)


def _evidence(probe: ProbeRecord, record: VerdictRecord) -> list[str]:
    """What the probe measured, and the causes that it or the attribution of its tokens found."""
    lines = [f"{visible(name)} = {visible(fact(value))}" for name, value in probe.evidence.items()]
    if probe.status is Outcome.FAIL:
        lines += _causes(record, (probe.name, "attribution"))
    return lines


def _conclusion(record: VerdictRecord) -> list[str]:
    return [f"{record.verdict}: {visible(record.says)}", *_causes(record, None)]


def _causes(record: VerdictRecord, found_by: tuple[str, ...] | None) -> list[str]:
    lines = []
    for cause in record.causes:
        if cause.gating and (found_by is None or cause.found_by in found_by):
            lines.append(f"cause: {visible(cause.cause)} ({visible(cause.evidence)})")
            lines.append(f"fix: {visible(cause.fix, LONGEST_TYPED)}")
    return lines
