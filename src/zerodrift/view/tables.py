"""Runs in a terminal: the list of them, and two of them side by side with what likely explains the difference.

A fact that one run alone states is no difference, for releases publish more or fewer of them. As in `text`, every
foreign string passes through `visible`.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerodrift.view.comparison import Comparison, FactChange, NumberChange, Part, StatusChange
from zerodrift.view.notation import number
from zerodrift.view.runs import RunSummary
from zerodrift.view.text import STYLES, table_of
from zerodrift.view.visible import visible

NOTHING = "–"
_MEANINGS = {
    Part.SEMANTIC: "what the numbers mean",
    Part.QUESTIONS: "what the audit asked",
    Part.NUMERIC: "how the numbers are computed",
    Part.DEPLOYMENT: "where they are computed",
}
_EXPLANATIONS = {
    Part.SEMANTIC: "The numbers mean something else, which likely explains it: settle that first.",
    Part.QUESTIONS: "Other questions were asked, which likely explains it: ask both runs the same.",
    Part.NUMERIC: "The numbers are computed another way, which explains rounding and nothing beyond it.",
    Part.DEPLOYMENT: "Only the deployment differs, which must change nothing: look at batching, scheduling and "
    "determinism.",
}


def print_runs(runs: Sequence[RunSummary], console: Console) -> None:
    """One line per run, however long, for `grep` and for copying; those that cannot be read say why below."""
    headers = ("run", "when", "verdict", "mean |Δ|", "cause", "engine", "model")
    rows = [[Text(header, style="dim") for header in headers], *(_run(run) for run in runs)]
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        for cell, width in zip(row, widths, strict=True):
            cell.pad_right(width - cell.cell_len)
        line = Text("  ").join(row)
        line.rstrip()
        console.print(line, soft_wrap=True)
    for run in runs:
        if run.problem is not None:
            console.print(Text(visible(f"{run.name}: {run.problem}"), style="dim"), soft_wrap=True)


def _run(run: RunSummary) -> list[Text]:
    return [
        Text(visible(run.name)),
        # In the reader's own time zone, as `ls -l` shows it.
        Text(f"{run.when.astimezone():%Y-%m-%d %H:%M}"),
        Text(run.state, style="dim") if run.verdict is None else Text(run.verdict, style=STYLES[run.verdict]),
        Text(NOTHING if run.mean is None else number(run.mean)),
        # The model last: it may be a path, and nothing is aligned after it.
        *(_cell(text) for text in (run.cause, run.engine, run.model)),
    ]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Fingerprints, numbers, and the sentence."""
    console.print(Text(f"{visible(comparison.before)} → {visible(comparison.after)}", style="bold"))
    console.print()
    _print_facts(comparison, console)
    changes = [
        StatusChange(name="verdict", before=comparison.verdict_before, after=comparison.verdict_after),
        *comparison.causes,
    ]
    for title, table in (
        ("outcome", _statuses(changes)),
        ("probes with another result", _statuses(comparison.probes) if comparison.probes else None),
        ("numbers", _numbers(comparison.numbers) if comparison.numbers else None),
    ):
        if table is not None:
            console.print(Text(title, style="dim"))
            console.print(table)
            console.print()
    if comparison.answers is not None:
        console.print(Text("answers to the same requests", style="dim"))
        console.print(Text(f"  {comparison.answers.message}"))
        console.print()
    console.print(Text(explain(comparison)))


def _print_facts(comparison: Comparison, console: Console) -> None:
    for part in Part:
        facts = [fact for fact in comparison.facts if fact.part is part]
        console.print(Text(f"{part}: {_MEANINGS[part]}", style="dim"))
        if not facts:
            console.print("  no difference")
        else:
            table = table_of("side", "fact", "before", "after")
            for fact in facts:
                table.add_row(fact.side, *(_cell(value) for value in (fact.name, fact.before, fact.after)))
            console.print(table)
        console.print()


def _statuses(changes: Sequence[StatusChange]) -> Table:
    table = table_of("", "before", "after")
    for change in changes:
        table.add_row(*(_cell(value) for value in (change.name, change.before, change.after)))
    return table


def _numbers(numbers: Sequence[NumberChange]) -> Table:
    table = table_of("", "before", "after", "change")
    for each in numbers:
        values = (NOTHING if value is None else number(value) for value in (each.before, each.after))
        table.add_row(each.name, *values, _change(each))
    return table


def _change(change: NumberChange) -> str:
    if change.before == change.after:
        return "="
    if not change.before or change.after is None:
        return NOTHING
    return f"× {number(change.after / change.before)}"


def _cell(text: str | None) -> Text:
    return Text(NOTHING if text is None else visible(text))


def explain(comparison: Comparison) -> str:
    """What the first part that differs means for the numbers; of those after it nothing is said."""
    for part in Part:
        if any(fact.part is part and _differs(fact) for fact in comparison.facts):
            alike = comparison.measured_alike
            return (
                f"Only {part} facts differ, and nothing that was measured." if alike else _EXPLANATIONS[part]
            )
    if comparison.measured_alike:
        return "Every fact that both runs state and every number is the same."
    if cause := next((each.name for each in comparison.causes if each.after == "fails"), None):
        return f"What both runs state is equal, and the second run names what it found: look at {cause}."
    failed = {each.name for each in comparison.probes if each.after == "fail"}
    if failed and failed <= {"sampling", "greedy"}:
        return "What both runs state is equal, and tokens are drawn otherwise from the same numbers: look at the sampler."
    return (
        "What both runs state is equal, so look at the weights and at determinism: does the second run, repeated, "
        "give its own numbers again?"
    )


def _differs(fact: FactChange) -> bool:
    """Both state it; a question that was not asked is a statement too."""
    return fact.part is Part.QUESTIONS or None not in (fact.before, fact.after)
