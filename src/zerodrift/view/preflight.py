"""A preflight as a page and in a terminal: every item with its evidence and what to type."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from zerodrift import __version__
from zerodrift.records.codec import write_atomically
from zerodrift.records.directory import CONFIG, ENVIRONMENT
from zerodrift.records.preflight import PreflightRecord, Status, read_preflight
from zerodrift.view.page import lines, render_page, text
from zerodrift.view.report import REPORT
from zerodrift.view.run_directory import document, json_facts
from zerodrift.view.text import copyable, table_of
from zerodrift.view.visible import visible

PAGE = "preflight.html"
HEADLINES = {
    Status.PASS: "Ready to train",
    Status.WARN: "Nothing fails; read the warnings",
    Status.FAIL: "Do not train on this yet",
    Status.INCONCLUSIVE: "Not everything could be judged",
    Status.SKIPPED: "Nothing was checked",
}
"""What the worst item means, on the page and in the terminal."""


def write_page(run_directory: Path) -> Path:
    """Render `run_directory` into its preflight.html: the whole page or the old one, never half."""
    path = run_directory / PAGE
    write_atomically(path, render(run_directory).encode())
    return path


def render(run_directory: Path) -> str:
    """The page of a finished preflight."""
    record = read_preflight(run_directory)
    config = document(run_directory / CONFIG)
    content = {
        "name": run_directory.resolve().name,
        "record": record,
        "headline": HEADLINES[record.status],
        # A report of before is not that of a preflight whose engine was never reached.
        "audited": (run_directory / REPORT).is_file()
        and any(item.name == "audit" and item.details for item in record.items),
        "config": None if config is None else lines(config),
        "environment": json_facts(run_directory / ENVIRONMENT),
        "version": __version__,
    }
    return render_page("preflight.html", content, [text("report.js")])


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
    rows = [
        (Text(visible(item.name)), Text(item.status, style=STYLES[item.status]), Text(visible(item.message)))
        for item in record.items
    ]
    console.print(table_of(("item", "status", "evidence"), rows))
    console.print()
    for item in record.items:
        label = f"to have {item.name}" if item.status is Status.SKIPPED else f"for {item.name}"
        for typed in item.type:
            copyable(label, typed, console, STYLES[item.status])
    copyable("run directory", str(run_directory), console)
    copyable("page", str(run_directory / PAGE), console)
