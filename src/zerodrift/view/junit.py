"""The verdict as a JUnit file, for whatever collects test results.

One test case per probe: failed probes are failures, required ones without an answer are errors, optional ones without
an answer are skipped. A collector sees nothing else, so the file is green exactly where the verdict is PASS: a verdict
that no probe carries gets a case of its own. Foreign text passes through `visible`, for XML 1.0 cannot hold controls at
all, not even escaped.
"""

from pathlib import Path
from xml.etree import ElementTree

from zerodrift.records.codec import write_atomically
from zerodrift.records.verdict import Outcome, ProbeRecord, VerdictRecord
from zerodrift.view.notation import fact
from zerodrift.view.visible import LONGEST_TYPED, visible

FAILURE, ERROR, SKIPPED = "failure", "error", "skipped"
_ENDS = {Outcome.PASS: None, Outcome.FAIL: FAILURE, Outcome.INCONCLUSIVE: ERROR}


def write_junit(path: Path, record: VerdictRecord) -> None:
    """The whole file or the old one; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, junit(record))


def junit(record: VerdictRecord) -> bytes:
    """A document with one test suite."""
    probes = list(record.probes)
    if _ENDS[record.verdict] not in [_end(probe) for probe in probes]:
        probes.insert(
            0, ProbeRecord(name="verdict", status=record.verdict, required=True, message=record.message)
        )
    ends = [_end(probe) for probe in probes]
    totals = {
        "name": "zerodrift audit",
        "tests": str(len(ends)),
        "failures": str(ends.count(FAILURE)),
        "errors": str(ends.count(ERROR)),
        "time": f"{sum(probe.seconds for probe in probes):.3f}",
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", totals | {"skipped": str(ends.count(SKIPPED))})
    for probe, end in zip(probes, ends, strict=True):
        named = {"name": visible(probe.name), "classname": f"zerodrift.audit.{visible(record.engine.engine)}"}
        case = ElementTree.SubElement(suite, "testcase", named, time=f"{probe.seconds:.3f}")
        if end is not None:
            said = ElementTree.SubElement(case, end, message=visible(probe.message))
            said.text = "\n".join(_evidence(probe, record))
    ElementTree.SubElement(suite, "system-out").text = f"{record.verdict}: {visible(record.message)}"
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _end(probe: ProbeRecord) -> str | None:
    end = _ENDS[probe.status]
    return SKIPPED if end == ERROR and not probe.required else end


def _evidence(probe: ProbeRecord, record: VerdictRecord) -> list[str]:
    """What the probe measured, and of a failed one the causes to fix."""
    lines = [f"{visible(name)} = {visible(fact(value))}" for name, value in probe.evidence.items()]
    if probe.status is Outcome.FAIL:
        for cause in record.to_fix:
            lines.append(f"cause: {visible(cause.cause)} ({visible(cause.evidence)})")
            lines.append(f"fix: {visible(cause.fix, LONGEST_TYPED)}")
    return lines
