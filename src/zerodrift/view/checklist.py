"""A preflight in a terminal: one line an item, then what to type, then where to read on."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from zerodrift.records.preflight import PreflightRecord, Status
from zerodrift.view.preflight import HEADLINES, PAGE
from zerodrift.view.text import copyable, table_of
from zerodrift.view.visible import visible

STYLES = {
    Status.PASS: "green",
    Status.WARN: "yellow",
    Status.FAIL: "red",
    Status.INCONCLUSIVE: "yellow",
    Status.SKIPPED: "dim",
}


def print_checklist(record: PreflightRecord, console: Console, run_directory: Path) -> None:
    """The answer, the items in order, and of each that did not pass what to type."""
    style = STYLES[record.status]
    console.print(Text.assemble((record.status.value, f"bold {style}"), f"  {HEADLINES[record.status]}"))
    console.print(Text(visible(f"{record.config}: {record.engine}, {record.model}"), style="dim"))
    console.print()
    table = table_of("item", "status", "evidence")
    for item in record.items:
        table.add_row(
            Text(visible(item.name)), Text(item.status, style=STYLES[item.status]), Text(visible(item.says))
        )
    console.print(table)
    console.print()
    for item in record.items:
        label = f"to have {item.name}" if item.status is Status.SKIPPED else f"for {item.name}"
        for typed in item.type:
            copyable(label, typed, console, STYLES[item.status])
    copyable("run directory", str(run_directory), console)
    copyable("page", str(run_directory / PAGE), console)
