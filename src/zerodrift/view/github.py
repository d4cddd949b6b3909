"""The verdict on GitHub Actions: a summary on the page of the job, and an annotation where the audit failed.

Foreign text is made visible and then escaped for what reads it: Markdown, or the runner, which takes a line that
begins with two colons for a command. GitHub refuses a summary above 1 MiB as a whole, so ours stays below and says
what it left out.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord
from zerodrift.view.notation import share
from zerodrift.view.verdict import VerdictSummary, summarise
from zerodrift.view.visible import LONGEST_TYPED, visible

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable with the path of the file that becomes the summary of a step."""
MOST_BYTES = 900_000
_CUT = "\n… cut here: GitHub takes 1 MiB of summary; verdict.json has it all.\n"
# CommonMark lets any ASCII punctuation be escaped, and then it is text whatever stands around it.
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_SIGNS = {Outcome.PASS: "✅", Outcome.FAIL: "❌", Outcome.INCONCLUSIVE: "⚠️"}


def append_summary(record: VerdictRecord, environment: Mapping[str, str]) -> bool:
    """Add to the summary of the step, where there is one; says whether there is."""
    if not (place := environment.get(SUMMARY)):
        return False
    path = Path(place)
    # One step may run several audits into the same file: the limit is on all of them together.
    room = MOST_BYTES - (path.stat().st_size if path.exists() else 0)
    with path.open("ab") as file:
        file.write(cut(summary(record), room))
    return True


def cut(text: str, most_bytes: int) -> bytes:
    """`text` whole, or its first lines and a word about the rest; nothing where not even that fits."""
    content = text.encode()
    if len(content) <= most_bytes:
        return content
    room = most_bytes - len(_CUT.encode())
    # At the end of a line: half a row, or half a character, would be worse than one row fewer.
    end = content.rfind(b"\n", 0, max(room, 0)) + 1
    return content[:end] + _CUT.encode() if room >= 0 else b""


def annotation(record: VerdictRecord) -> str | None:
    """The line that makes GitHub mark the job, where the audit failed."""
    if record.verdict is not Outcome.FAIL:
        return None
    principal = summarise(record).principal
    title = "zerodrift audit" if principal is None else f"zerodrift audit: {principal.cause}"
    message = record.says if principal is None else f"{record.says} Fix: {principal.fix}"
    return f"::error title={_property(visible(title))}::{_data(visible(message, LONGEST_TYPED))}"


def summary(record: VerdictRecord) -> str:
    """Verdict, causes with their fixes, and the probes, as Markdown."""
    said = summarise(record)
    parts = [
        f"## {_SIGNS[record.verdict]} {record.verdict}: {said.headline}",
        _paragraph(record, said),
        *(_fix(cause) for cause in said.to_fix),
        _table(("probe", "status", "says"), [_row(probe) for probe in record.probes])
        if record.probes
        else "",
        "To repeat it:\n\n" + _block(record.reproduce) if record.reproduce else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n\n"


def _paragraph(record: VerdictRecord, said: VerdictSummary) -> str:
    audited = f"Engine **{_plain(record.engine.engine)}**, model {_plain(record.model)}, {_plain(record.precision)}."
    guilty = f" Guilty: {_plain(said.guilty)}." if record.verdict is Outcome.FAIL else ""
    return f"{_plain(said.why)}\n\n{audited}{guilty}"


def _fix(cause: CauseFound) -> str:
    found = f"**{_plain(cause.cause)}** explains {_plain(share(cause.explained))}: {_plain(cause.evidence)}"
    return f"{found}\n\n{_block(cause.fix)}"


def _row(probe: ProbeRecord) -> tuple[str, ...]:
    status = "vacuous" if probe.vacuous else probe.status.value
    return (_plain(probe.name), f"{_SIGNS[probe.status]} {status}", _plain(probe.says))


def _table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headers, tuple("---" for _ in headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block(text: str) -> str:
    """A code block, fenced with more backticks than `text` has in a row."""
    shown = visible(text, LONGEST_TYPED)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{shown}\n{fence}"


def _plain(text: str) -> str:
    return _PUNCTUATION.sub(r"\\\1", visible(text))


def _data(text: str) -> str:
    # The runner also unescapes line breaks, of which `visible` left none.
    return text.replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
