"""A diagnosis in a terminal: what is wrong first, with what to type; then every setting, and what was not judged."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from zerodrift.doctor.diagnosis import Advice, Diagnosis, Row
from zerodrift.doctor.rule import Severity
from zerodrift.view.visible import LONGEST_TYPED, visible
from zerodrift.view.wrapped import print_wrapped

STYLES = {
    Severity.WRONG: "red",
    Severity.RISK: "yellow",
    Severity.NOTE: "cyan",
    Severity.UNKNOWN: "magenta",
    Severity.FINE: "green",
}
_HEADLINES = {
    0: ("OK", "green", "Nothing here is known to be wrong"),
    1: ("WRONG", "red", "Do not train on this yet"),
    3: ("UNKNOWN", "yellow", "What decides cannot be seen from here"),
}
_INDENT = " " * 7
NARROWEST = 16
"""Columns that a sentence of the table needs to be read."""
LONGEST_VALUE = 30
"""Of a value in the table; findings show it whole."""


def print_diagnosis(diagnosis: Diagnosis, console: Console, *, everything: bool = False) -> None:
    """The answer, what is wrong or at risk, and what decides and cannot be seen; with `everything`, all of it."""
    word, style, headline = _HEADLINES[diagnosis.exit_code]
    counted = ", ".join(diagnosis.counts())
    console.print(
        Text.assemble((word, f"bold {style}"), f"  {headline}: {counted}" if counted else f"  {headline}")
    )
    console.print(Text(visible(diagnosis.target), style="dim"))
    if diagnosis.unseen:
        console.print(Text(diagnosis.unseen, style=STYLES[Severity.UNKNOWN]))
    console.print()
    for advice in diagnosis.findings:
        if everything or advice.severity is not Severity.NOTE:
            _print_advice(advice, console)
    shown = [row for row in diagnosis.settings if everything or row.severity is Severity.UNKNOWN]
    if shown:
        _print_settings(shown, console)
    if diagnosis.not_judged:
        console.print(Text("\nnot judged:" if shown else "not judged:", style="dim"))
        for text in diagnosis.not_judged:
            print_wrapped(Text("    "), visible(text), console)
    if not everything:
        notes = sum(advice.severity is Severity.NOTE for advice in diagnosis.findings)
        counted = f"{notes} {'note' if notes == 1 else 'notes'} and " if notes else ""
        folded = f"{counted}all {len(diagnosis.settings)} settings: --all"
        console.print(Text(f"\n{folded}" if shown or diagnosis.not_judged else folded, style="dim"))


def _print_advice(advice: Advice, console: Console) -> None:
    head = Text.assemble((f"{advice.severity:<7}", STYLES[advice.severity]), (visible(advice.title), "bold"))
    console.print(Text.assemble(head, f" {visible(advice.value)}"), soft_wrap=True)
    print_wrapped(Text(_INDENT), visible(advice.message), console)
    lines = [*(("fix", typed) for typed in advice.type), ("do", advice.do), ("cause", advice.cause or "")]
    lines += [("see", source) for source in advice.source]
    for label, text in lines:
        head = Text.assemble(_INDENT, (f"{label:<6}", "dim"))
        if text and (label == "do" or (label == "see" and " " in text)):
            print_wrapped(head, visible(text), console)
        elif text:
            # On one line each, however long: people copy them.
            style = STYLES[advice.severity] if label == "fix" else ""
            console.print(Text.assemble(head, (visible(text, LONGEST_TYPED), style)), soft_wrap=True)
    console.print()


def _print_settings(rows: Sequence[Row], console: Console) -> None:
    """A line for each setting; why it is judged so goes on below itself where the terminal ends."""
    headers = ("setting", "value", "from", "judged", "")
    lines = [[Text(header, style="dim") for header in headers], *(_cells(row) for row in rows)]
    widths = [max(cell.cell_len for cell in column) for column in zip(*lines, strict=True)]
    for cells in lines:
        *firsts, why = cells
        for cell, width in zip(firsts, widths, strict=False):
            cell.pad_right(width - cell.cell_len)
        head = Text("  ").join([*firsts, Text("")])
        # Beside columns that leave it no room, it stands alone in the next line.
        if console.width - head.cell_len < NARROWEST and why.plain:
            console.print(_stripped(head), soft_wrap=True)
            head = Text(" " * 4)
        if why.plain:
            print_wrapped(head, why.plain, console, "dim")
        else:
            console.print(_stripped(head), soft_wrap=True)


def _stripped(line: Text) -> Text:
    line.rstrip()
    return line


def _cells(row: Row) -> list[Text]:
    value = Text(visible(row.shown))
    value.truncate(LONGEST_VALUE, overflow="ellipsis")
    return [
        Text(visible(row.title)),
        value,
        Text(row.origin, style="dim"),
        Text(row.severity, style=STYLES[row.severity]),
        Text(visible(row.message), style="dim"),
    ]
