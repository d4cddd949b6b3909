"""Runs in a terminal: the list of them, two of them side by side, and one sentence about what changed.

The part that explains most is named, and no other: where the meaning of the numbers changed, how they are rounded is
no news. A fact that one run alone states is no difference, for releases publish more or fewer of them. Rounding never
explains a cause of another layer, and equal fingerprints explain nothing. As in `text`, every foreign string passes
through `visible`.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerodrift.core.cause import CAUSES, Layer
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
        ("probes that ended otherwise", _statuses(comparison.probes) if comparison.probes else None),
        ("numbers", _numbers(comparison.numbers) if comparison.numbers else None),
    ):
        if table is not None:
            console.print(Text(title, style="dim"))
            console.print(table)
            console.print()
    if comparison.answers is not None:
        console.print(Text("answers to the same requests", style="dim"))
        console.print(Text(f"  {comparison.answers.says}"))
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


MOST_FACTS = 3
"""More than that is a list, and the list stands above the sentence."""
LONGEST_FACT = 60
LEAST_SHARED = 16
"""Tokens that both runs sampled, before equal bits among them say something."""


def explain(comparison: Comparison) -> str:
    """The sentence."""
    return f"{_outcome(comparison)}{_drift(comparison)}; {_reason(comparison)}"


def _outcome(comparison: Comparison) -> str:
    before, after = comparison.verdict_before, comparison.verdict_after
    if before is after:
        verdict = f"The verdict stays {after}"
    else:
        verdict = f"The verdict went from {before} to {after}"
    appeared, gone = _appeared(comparison), [c.name for c in comparison.causes if c.before == "fails"]
    causes = [f"with {name}" for name in appeared] + [f"without {name}" for name in gone]
    return " ".join([verdict, " and ".join(map(visible, causes))]).rstrip()


def _appeared(comparison: Comparison) -> list[str]:
    """Causes that fail the second run and did not fail the first."""
    return [cause.name for cause in comparison.causes if cause.after == "fails"]


def _drift(comparison: Comparison) -> str:
    mean = next((each for each in comparison.numbers if each.name == "mean |Δ|"), None)
    if mean is None or mean.before is None or mean.after is None:
        return ""
    if mean.before == mean.after:
        return f", mean |Δ| unchanged at {number(mean.after)}"
    return f", mean |Δ| from {number(mean.before)} to {number(mean.after)}"


def _reason(comparison: Comparison) -> str:
    for part in Part:
        if facts := [fact for fact in comparison.facts if fact.part is part and _differs(fact)]:
            named = _named(facts)
            if comparison.measured_alike:
                return f"{part} facts differ ({named}), and nothing that was measured does."
            return _reasons(comparison, part).format(facts=named)
    if comparison.measured_alike:
        return "every fact that both state and every number is the same."
    look = (
        "look at the weights and at determinism: does the second run, repeated, give its own numbers again?"
    )
    if alone := [fact for fact in comparison.facts if not _differs(fact)]:
        return f"what both runs state is equal, and {_named(alone)} only one of them states; otherwise {look}"
    return f"fingerprints and questions are equal, so {look}"


def _differs(fact: FactChange) -> bool:
    """Both state it; a question that was not asked is a statement too."""
    return fact.part is Part.QUESTIONS or None not in (fact.before, fact.after)


def _reasons(comparison: Comparison, part: Part) -> str:
    if part is Part.NUMERIC and (beyond := _beyond_rounding(comparison)):
        return (
            "the numbers are computed another way ({facts}), but rounding does not make "
            f"{visible(beyond)}: look for a setting that the engine does not tell."
        )
    if part is Part.NUMERIC and _other_draws(comparison):
        return (
            "the engine is another ({facts}), and gives the same tokens the same logprobs to the last bit: what "
            "changed is which tokens a seed draws."
        )
    return {
        Part.SEMANTIC: "the numbers mean something else ({facts}), which likely explains it: settle that first.",
        Part.QUESTIONS: "other questions were asked ({facts}), which likely explains it: ask both runs the same.",
        Part.NUMERIC: "the numbers are computed another way ({facts}), which likely explains it as rounding.",
        Part.DEPLOYMENT: "only the deployment differs ({facts}), which must change nothing: look at batching, "
        "scheduling and determinism.",
    }[part]


def _other_draws(comparison: Comparison) -> bool:
    """Other tokens are all that the answers to the same requests differ in."""
    answers = comparison.answers
    if answers is None or comparison.worse or answers.same_tokens == answers.samples:
        return False
    return answers.shared_tokens >= LEAST_SHARED and not answers.differing


def _beyond_rounding(comparison: Comparison) -> str | None:
    """The first cause that appeared and that no way of computing makes."""
    layers = {name: CAUSES[name].layer for name in _appeared(comparison) if name in CAUSES}
    return next((name for name, layer in layers.items() if layer not in (Layer.PATH, Layer.NONE)), None)


def _named(facts: Sequence[FactChange]) -> str:
    shown = [_fact_change(fact) for fact in facts[:MOST_FACTS]]
    if len(facts) > MOST_FACTS:
        shown.append(f"and {len(facts) - MOST_FACTS} more")
    return ", ".join(shown)


def _fact_change(fact: FactChange) -> str:
    owner = "" if fact.side == "audit" else f"{fact.side}'s "
    return f"{owner}{visible(fact.name, LONGEST_FACT)} {_value(fact.before)} → {_value(fact.after)}"


def _value(value: str | None) -> str:
    return "not stated" if value is None else visible(value, LONGEST_FACT)
