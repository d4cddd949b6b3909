"""docs/faults.md, as a function of what was measured: docs/faults.jsonl, docs/tokens.jsonl and docs/healthy.jsonl.

python tests/faults/page.py            # writes the page
"""

import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from healthy import RESULTS as HEALTHY
from healthy import Tally, read
from matrix import AND, RESULTS, ROOT, SMOLLM2, Row, named
from tokens import MODELS, Detection
from tokens import RESULTS as TOKENS

from zerodrift.faults.registry import FAULTS
from zerodrift.records.codec import read_lines

HIDDEN_NUCLEUS = "semantic/sampling-bias:top-p-0.95"
PAGE = ROOT / "docs" / "faults.md"
HEAD = """# Planted faults, and what the audit said

Written by `make faults-full`: every injector (`zerodrift audit --inject list`) planted in an engine that is otherwise
the reference in fp32, on {models}. A fault that a model has no part for (no sliding window, no tied head) is not planted
there. Causes that the data of one audit cannot tell apart count as one; [attribution.md](attribution.md) says which.

**Detected {detected} of {total} ({detection:.1%}); principal cause right {right} of {total} ({precision:.1%}).** A run
on a built-in model took {median:.1f} s of one core at the median, {longest:.1f} s at most, from the first question to the
verdict with its smallest case{real}. {states}

*Tokens* are those that must be sampled until the fault is seen in 95 of 100 orders of the sequences, on weights that
were trained ({trained}). An audit judges no fewer than 200. A dash: an update, a trainer, or a comparison of
the engine with itself shows it, by a probe of fixed size.{theory}

| fault | what it does | detected | named | {columns}otherwise named |
|---|---|---|---|{rules}---|
"""
TWO = """
## Two at once

Both must be among the gating causes: **{right} of {total} ({share:.1%})**.

| first | second | detected | both named | named instead |
|---|---|---|---|---|
"""
WELL = """
## Healthy engines

{runs} cheap runs (parity and sampling on {tokens} tokens each, every run with samples of its own): **{failed} failed**,
{doubted} asked for more samples. Under the null a p-value is uniform; Kolmogorov and Smirnov's test of that:

| test of the samples | p-values below 0.05 | p of uniformity |
|---|---|---|
"""


def page(rows: Sequence[Row], tokens: Sequence[Detection], tallies: Sequence[Tally]) -> str:
    """The document for these results."""
    single = [row for row in rows if AND not in row.fault]
    trained = [model for model in MODELS if any(each.model == model for each in tokens)]
    built_in = [row.seconds for row in single if row.model.startswith("testbed:")]
    text = HEAD.format(
        models=", ".join(sorted({row.model for row in single})),
        total=len(single),
        detected=(detected := sum(row.verdict == "FAIL" for row in single)),
        detection=detected / len(single),
        right=(right := sum(named(row) for row in single)),
        precision=right / len(single),
        states=_states(rows),
        median=statistics.median(built_in),
        longest=max(built_in),
        real=_on_real_weights([row for row in single if row.model == SMOLLM2]),
        theory=_theory(tokens),
        trained=" and ".join(trained) or "not measured yet",
        columns="".join(f"tokens, {model} | " for model in trained),
        rules="---|" * len(trained),
    )
    text += _lines(single, {(each.fault, each.model): each for each in tokens}, trained)
    if pairs := [row for row in rows if AND in row.fault]:
        right = sum(named(row) for row in pairs)
        text += TWO.format(right=right, total=len(pairs), share=right / len(pairs)) + _pairs(pairs)
    if tallies:
        text += _well(tallies)
    return text


def _theory(tokens: Sequence[Detection]) -> str:
    """A fault that no number shows, beside what a martingale of 5 σ takes on paper."""
    seen = [
        f"{each.median:,} on {each.model}" for each in tokens if each.fault == HIDDEN_NUCLEUS and each.median
    ]
    if not seen:
        return ""
    return (
        f" Samples from a nucleus of 0.95 with the numbers of the whole take 1,100 to 1,300 tokens in theory; at the "
        f"median it took {' and '.join(seen)}."
    )


def _states(rows: Sequence[Row]) -> str:
    """Of the package's source, and how many rows each gave."""
    counted = Counter(row.code for row in rows)
    told = ", ".join(f"`{code}` ({count})" for code, count in counted.most_common())
    return f"Rows by state of the source: {told}."


def _on_real_weights(rows: Sequence[Row]) -> str:
    if not rows:
        return "; SmolLM2, at minutes for each, is not in this table yet"
    seconds = [row.seconds for row in rows]
    accelerated = sum(row.device != "cpu" for row in rows)
    return (
        f"; on SmolLM2 {statistics.median(seconds):.0f} s and {max(seconds):.0f} s, {accelerated} of {len(rows)} with "
        "the models on a GPU"
    )


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.fault, row.model)):
        groups[row.fault].append(row)
    return groups


def _lines(rows: Sequence[Row], tokens: Mapping[tuple[str, str], Detection], trained: Sequence[str]) -> str:
    return "".join(
        f"| `{name}` | {FAULTS[name].message} | {_counts(group)} | "
        f"{''.join(_tokens(tokens.get((name, model))) + ' | ' for model in trained)}{_otherwise(group)} |\n"
        for name, group in _grouped(rows).items()
    )


def _tokens(found: Detection | None) -> str:
    return "–" if found is None or found.p95 is None else f"{found.p95:,}"


def _pairs(rows: Sequence[Row]) -> str:
    return "".join(
        f"| `{name.split(AND)[0]}` | `{name.split(AND)[1]}` | {_counts(group)} | {_otherwise(group)} |\n"
        for name, group in _grouped(rows).items()
    )


def _counts(rows: Sequence[Row]) -> str:
    found, right = sum(row.verdict == "FAIL" for row in rows), sum(named(row) for row in rows)
    return f"{found}/{len(rows)} | {right}/{len(rows)}"


def _otherwise(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row.model}: {', '.join(f'`{cause}`' for cause in row.found) or row.verdict}"
        for row in rows
        if not named(row)
    )


def _well(tallies: Sequence[Tally]) -> str:
    text = WELL.format(
        runs=f"{sum(tally.runs for tally in tallies):,}",
        tokens=tallies[0].tokens_per_run,
        failed=sum(tally.failed for tally in tallies),
        doubted=sum(tally.doubted for tally in tallies),
    )
    for name in tallies[0].p_values:
        values = sorted(value for tally in tallies for value in tally.p_values[name])
        below = sum(value < 0.05 for value in values) / len(values)
        text += f"| {name} | {below:.1%} | {Tally.uniform(values):.2g} |\n"
    return text


def current() -> str:
    """The page of what is on record."""
    tokens = list(read_lines(TOKENS, Detection)) if TOKENS.exists() else []
    return page(list(read_lines(RESULTS, Row)), tokens, read(HEALTHY) if HEALTHY.exists() else [])


def main() -> int:
    PAGE.write_text(current())
    return 0


if __name__ == "__main__":
    sys.exit(main())
