"""Runs in a terminal: the list of them, and two of them side by side with what likely explains the difference.

A fact that one run alone states is no difference, for releases publish more or fewer of them. As in `text`, every
foreign string passes through `visible`.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from zerodrift.view.comparison import Change, Comparison, FactChange, Part
from zerodrift.view.notation import number
from zerodrift.view.runs import RunSummary
from zerodrift.view.text import STYLES, table_of
from zerodrift.view.visible import visible

NOTHING = "–"
_ANSWERS = 4
"""Columns of a list of runs that say how each ended; those behind them say of what."""
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
    None: "What both runs state is equal, so look at the weights and at determinism: does the second run, repeated, "
    "give its own numbers again?",
}
_BEGINNINGS = {
    Part.NUMERIC: "The numbers are computed another way",
    Part.DEPLOYMENT: "Only the deployment differs",
    None: "What both runs state is equal",
}


def print_runs(runs: Sequence[RunSummary], console: Console, *, fit: bool = False) -> None:
    """One line per run, however long, for `grep` and for copying; those that cannot be read say why below.

    `fit` is for people: where lines would be wider than the terminal, what was found goes below each run.
    """
    headers = ("run", "when", "verdict", "mean |Δ|", "cause", "engine", "model")
    rows = [[Text(header, style="dim") for header in headers], *(_run(run) for run in runs)]
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    below = fit and sum(widths) + 2 * len(widths) > console.width
    for row in rows:
        for cell, width in zip(row, widths, strict=True):
            cell.pad_right(width - cell.cell_len)
        for cells in (row[:_ANSWERS], [Text(), *row[_ANSWERS:]]) if below else (row,):
            line = Text("  ").join(cells)
            line.rstrip()
            if line:
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
    for part in Part:
        facts = [(Text(fact.side), *_row(fact)) for fact in comparison.facts if fact.part is part]
        _titled(f"{part}: {_MEANINGS[part]}", ("side", "fact", "before", "after"), facts, console)
    verdict = Change(name="verdict", before=comparison.verdict_before, after=comparison.verdict_after)
    outcomes = [_row(change) for change in (verdict, *comparison.causes)]
    _titled("outcome", ("", "before", "after"), outcomes, console)
    if comparison.probes:
        probes = [_row(change) for change in comparison.probes]
        _titled("probes with another result", ("", "before", "after"), probes, console)
    if comparison.numbers:
        numbers = [(*_row(change), Text(_factor(change))) for change in comparison.numbers]
        _titled("numbers", ("", "before", "after", "change"), numbers, console)
    if (same := comparison.answers) is not None:
        console.print(
            f"answers to the same requests: {same.same_tokens} of {same.samples} have the same tokens; of "
            f"{same.shared_tokens:,} logprobs up to where they part {same.differing:,} differ, by {same.largest:.2g} at most"
        )
        console.print()
    console.print(Text(explain(comparison)))


def _titled(title: str, headers: Sequence[str], rows: Sequence[Sequence[Text]], console: Console) -> None:
    console.print(Text(title, style="dim"))
    console.print(table_of(headers, rows) if rows else "  no difference")
    console.print()


def _row(change: Change) -> tuple[Text, Text, Text]:
    before, after = (
        number(value) if isinstance(value, float | int) else value for value in (change.before, change.after)
    )
    return _cell(change.name), _cell(before), _cell(after)


def _factor(change: Change) -> str:
    before, after = change.before, change.after
    if before == after:
        return "="
    if not isinstance(before, float | int) or not isinstance(after, float | int) or not before:
        return NOTHING
    return f"× {number(after / before)}"


def _cell(text: str | None) -> Text:
    return Text(NOTHING if text is None else visible(text))


def explain(comparison: Comparison) -> str:
    """What the first part that differs means for the numbers; of those after it nothing is said.

    Beside facts that explain no more than rounding, what a run proved is named: a release that reports something else is
    not told by its number.
    """
    part = next((fact.part for fact in comparison.facts if _differs(fact)), None)
    if comparison.measured_alike:
        return (
            "Every fact that both runs state and every number is the same."
            if part is None
            else f"Only {part} facts differ, and nothing that was measured."
        )
    if part in (Part.SEMANTIC, Part.QUESTIONS):
        return _EXPLANATIONS[part]
    return _proved(comparison, _BEGINNINGS[part]) or _EXPLANATIONS[part]


def _proved(comparison: Comparison, beginning: str) -> str | None:
    """What one of the runs found by itself, and the other did not."""
    if cause := next((each.name for each in comparison.causes if each.after == "fails"), None):
        return f"{beginning}, and the second run names what it found: look at {cause}."
    failed = {each.name for each in comparison.probes if each.after == "fail"}
    if failed and failed <= {"sampling", "greedy"}:
        return f"{beginning}, and tokens are drawn otherwise from the same numbers: look at the sampler."
    if gone := next((each.name for each in comparison.causes if each.before == "fails"), None):
        return f"{beginning}, and what the first run found is gone: {gone}."
    return None


def _differs(fact: FactChange) -> bool:
    """Both state it; a question that was not asked is a statement too."""
    return fact.part is Part.QUESTIONS or None not in (fact.before, fact.after)
