"""A verdict, or one case, in a terminal: the answers, what was asked, and where to read on.

Every foreign string passes through `visible`, because a terminal obeys what it prints; fixes and paths stand alone
on lines that are never wrapped, because people copy them.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerodrift.records.case import Case
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord
from zerodrift.view.notation import count, number, share
from zerodrift.view.report import REPORT
from zerodrift.view.verdict import Gauge, VerdictSummary, gauges, summarise
from zerodrift.view.visible import LONGEST_TYPED, visible

STYLES = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow"}


def print_verdict(record: VerdictRecord, console: Console, run_directory: Path | None) -> None:
    """Summarise `record`; `run_directory` None leaves out where the files are."""
    said = summarise(record)
    _answer(record, said, console)
    for label, typed in _to_type(record, said):
        copyable(label, typed, console, STYLES[record.verdict])
    measured = gauges(record)
    for table in (
        _causes(record.causes) if record.causes else None,
        _probes(record.probes) if record.probes else None,
        _gauges(measured) if measured else None,
    ):
        if table is not None:
            console.print(table)
            console.print()
    if worth := _worth(record):
        console.print(Text(worth))
        console.print()
    _power(record, console)
    if record.reproduce_smallest:
        copyable(f"smallest case, {record.smallest}", record.reproduce_smallest, console)
    if run_directory is not None:
        copyable("run directory", str(run_directory), console)
        if (report := run_directory / REPORT).is_file():
            copyable("report", str(report), console)


def _answer(record: VerdictRecord, said: VerdictSummary, console: Console) -> None:
    verdict = (record.verdict.value, f"bold {STYLES[record.verdict]}")
    console.print(Text.assemble(verdict, f"  {said.headline}"))
    facts = {"guilty": said.guilty}
    if said.principal is not None:
        facts["cause"] = said.principal.cause
    facts["why"] = said.why
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="dim"), Text(visible(value), style="bold" if name == "cause" else ""))
    console.print(grid)
    console.print()


def _to_type(record: VerdictRecord, said: VerdictSummary) -> list[tuple[str, str]]:
    """Fixes, principal first; without one, where there was no verdict, the command that asks again."""
    if said.to_fix:
        principal, *others = said.to_fix
        return [("type this", principal.fix), *((f"and for {cause.cause}", cause.fix) for cause in others)]
    if record.verdict is Outcome.INCONCLUSIVE and record.reproduce:
        return [("fix what could not be judged, then", record.reproduce)]
    return []


def copyable(label: str, text: str, console: Console, style: str = "") -> None:
    """`text` on a line of its own, however long: a terminal wraps it, a copy does not."""
    console.print(Text(f"{visible(label)}:", style="dim"))
    console.print(Text.assemble("    ", (visible(text, LONGEST_TYPED), style)), soft_wrap=True)
    console.print()


def _causes(causes: tuple[CauseFound, ...]) -> Table:
    table = table_of("cause", "gating", "explained", "evidence")
    for cause in causes:
        table.add_row(
            Text(visible(cause.cause)),
            Text("fails", style="red") if cause.gating else Text("listed", style="dim"),
            Text(share(cause.explained)),
            Text(visible(cause.evidence)),
        )
    return table


def _probes(probes: tuple[ProbeRecord, ...]) -> Table:
    table = table_of("probe", "status", "says")
    for probe in probes:
        status = "vacuous" if probe.vacuous else probe.status.value.lower()
        table.add_row(
            Text(visible(probe.name)), Text(status, style=STYLES[probe.status]), Text(visible(probe.says))
        )
    return table


def _gauges(measured: tuple[Gauge, ...]) -> Table:
    table = table_of("nats", "measured", "floor", "gate")
    for gauge in measured:
        table.add_row(
            gauge.name,
            Text(number(gauge.measured), style="red" if gauge.broken else ""),
            *("–" if mark is None else number(mark) for mark in (gauge.floor, gauge.gate)),
        )
    return table


def _worth(record: VerdictRecord) -> str:
    forms = {
        "tokens": ("tokens", count),
        "token_ess": ("token ESS", share),
        "sequence_ess": ("sequence ESS", share),
    }
    return "   ".join(
        f"{name} {form(record.metrics[key])}" for key, (name, form) in forms.items() if key in record.metrics
    )


def _power(record: VerdictRecord, console: Console) -> None:
    """Under every verdict: a PASS is about what would have been seen, and about nothing else."""
    console.print(Text("power: what would have been seen, 19 times in 20", style="dim"))
    for line in record.power:
        console.print(Text(f"    {visible(line.says)}"))
    if not any(line.name != "far positions" for line in record.power):
        console.print(Text("    of the sampler: nothing, because nothing was drawn that could be tested"))
    console.print()


def table_of(*headers: str) -> Table:
    """Columns without lines, which fold where the terminal ends."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def print_replayed(
    case: Case, tokens: Sequence[tuple[int, float, float]], problem: str, console: Console
) -> None:
    """`tokens` are (id, reported, contracted); `problem` says why there are none."""
    console.print(Text(f"{case.message}; a token is wrong beyond {number(case.limit)} nats"))
    console.print(Text(f"prompt {visible(str(list(case.requests[0].prompt.token_ids)))}"), soft_wrap=True)
    if problem:
        console.print(Text(visible(problem), style="red"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("token", "engine", "reference", "Δ", ""):
        table.add_column(header, justify="right")
    for token, reported, contracted in tokens:
        delta = contracted - reported
        wrong = not abs(delta) <= case.limit
        table.add_row(
            str(token),
            f"{reported:.6f}",
            f"{contracted:.6f}",
            Text(f"{delta:+.2g}", style="red" if wrong else ""),
            Text("wrong", style="red") if wrong else Text("right", style="green"),
        )
    console.print(table)
