"""A verdict, or one case, in a terminal: the answers, what was asked, and where to read on.

Every foreign string passes through `visible`, because a terminal obeys what it prints; fixes and paths stand alone
on lines that are never wrapped, because people copy them.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerodrift.records.case import Case
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord
from zerodrift.view.notation import count, number, share
from zerodrift.view.report import REPORT
from zerodrift.view.verdict import HEADLINES, Gauge, gauges, guilty, next_step, scope
from zerodrift.view.visible import LONGEST_TYPED, visible
from zerodrift.view.wrapped import print_wrapped

NOT_OF_THE_SAMPLER = ("far positions", "chat template")
"""Power lines that say nothing about draws."""
STYLES = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow"}


def print_verdict(
    record: VerdictRecord,
    console: Console,
    run_directory: Path | None,
    *,
    about: Mapping[str, str] | None = None,
    to_type: Sequence[tuple[str, str]] = (),
) -> None:
    """Summarise `record`; `run_directory` None leaves out where the files are.

    `about` are facts that stand on top in the place of the guilty side, and `to_type` commands, with what each is for,
    in the place of the one that the record holds.
    """
    _answer(record, console, about)
    for label, typed in to_type or _to_type(record):
        copyable(label, typed, console, STYLES[record.verdict])
    for headers, rows in (
        (("cause", "gating", "explained", "evidence"), [_cause(cause) for cause in record.causes]),
        (("probe", "status", "says"), [_probe(probe) for probe in record.probes]),
        (("nats", "measured", "floor", "gate"), [_gauge(gauge) for gauge in gauges(record)]),
    ):
        if rows:
            console.print(table_of(headers, rows))
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


def _answer(record: VerdictRecord, console: Console, about: Mapping[str, str] | None) -> None:
    verdict = (record.verdict.value, f"bold {STYLES[record.verdict]}")
    console.print(Text.assemble(verdict, f"  {HEADLINES[record.verdict]}"))
    facts = dict(about or {"guilty": guilty(record)})
    if record.to_fix:
        facts["cause"] = record.to_fix[0].cause
    facts["why"] = record.message
    if judged := scope(record):
        facts["scope"] = judged
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="dim"), Text(visible(value), style="bold" if name == "cause" else ""))
    console.print(grid)
    console.print()


def _to_type(record: VerdictRecord) -> list[tuple[str, str]]:
    """Fixes, principal first; without one, where there was no verdict, the command that asks again."""
    first = next_step(record)
    others = [(f"and for {cause.cause}", cause.fix) for cause in record.to_fix[1:]]
    return others if first is None else [first, *others]


def copyable(label: str, text: str, console: Console, style: str = "") -> None:
    """`text` on a line of its own, however long: a terminal wraps it, a copy does not."""
    console.print(Text(f"{visible(label)}:", style="dim"))
    console.print(Text.assemble("    ", (visible(text, LONGEST_TYPED), style)), soft_wrap=True)
    console.print()


def _cause(cause: CauseFound) -> tuple[Text, ...]:
    gating = Text("fails", style="red") if cause.gating else Text("listed", style="dim")
    return Text(visible(cause.cause)), gating, Text(share(cause.explained)), Text(visible(cause.evidence))


def _probe(probe: ProbeRecord) -> tuple[Text, ...]:
    status = "vacuous" if probe.vacuous else probe.status.value.lower()
    return Text(visible(probe.name)), Text(status, style=STYLES[probe.status]), Text(visible(probe.message))


def _gauge(gauge: Gauge) -> tuple[Text, ...]:
    measured = Text(number(gauge.measured), style="red" if gauge.broken else "")
    marks = (Text("–" if mark is None else number(mark)) for mark in (gauge.floor, gauge.gate))
    return Text(gauge.name), measured, *marks


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
        print_wrapped(Text("    "), visible(line.message), console)
    if not any(line.name not in NOT_OF_THE_SAMPLER for line in record.power):
        console.print(Text("    of the sampler: nothing, because nothing was drawn that could be tested"))
    console.print()


def table_of(headers: Sequence[str], rows: Iterable[Sequence[Text]], **columns: Any) -> Table:
    """Columns without lines, which fold where the terminal ends."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        table.add_column(header, overflow="fold", **columns)
    for row in rows:
        table.add_row(*row)
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
    rows = []
    for token, reported, contracted in tokens:
        delta = contracted - reported
        word, style = ("right", "green") if abs(delta) <= case.limit else ("wrong", "red")
        cells = str(token), f"{reported:.6f}", f"{contracted:.6f}", f"{delta:+.2g}"
        rows.append([*map(Text, cells), Text(word, style=style)])
    console.print(table_of(("token", "engine", "reference", "Δ", ""), rows, justify="right"))
