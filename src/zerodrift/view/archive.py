"""An archive in a terminal: which batches there are, what one of them holds, and what is damaged."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerodrift.records.archive.index import Entry, Removed
from zerodrift.records.archive.reader import Finding
from zerodrift.records.archived import OPTIONAL_LOGPROBS, ArchivedBatch, ArchivedRollout, BatchState
from zerodrift.view.notation import count, number
from zerodrift.view.visible import visible

STYLES = {
    BatchState.OK: "green",
    BatchState.WARN: "yellow",
    BatchState.QUARANTINE: "red",
    BatchState.HALT: "bold red",
}
UNKNOWN = "–"
SHORT = 12
"""Characters of a name: one in 10^14 pairs of batches shares them."""


def _table(headers: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    """Without columns of which nothing is known; only the last one is wrapped, for names are copied."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    told = [place for place in range(len(headers)) if any(row[place].plain != UNKNOWN for row in rows)]
    for place in told:
        table.add_column(headers[place], overflow="fold", no_wrap=place != told[-1])
    for row in rows:
        table.add_row(*(row[place] for place in told))
    return table


def print_entries(entries: Sequence[Entry], removed: Sequence[Removed], console: Console) -> None:
    """One line for each batch."""
    rows = [
        (
            Text(entry.batch[:SHORT]),
            Text(str(entry.step)),
            Text(entry.state, style=STYLES[entry.state]),
            Text(count(entry.rollouts)),
            Text(count(entry.tokens)),
            Text(visible(entry.trainer_version or UNKNOWN)),
            Text(entry.when),
            Text(visible("; ".join(entry.reasons)) or UNKNOWN),
        )
        for entry in entries
    ]
    headers = ("batch", "step", "state", "rollouts", "tokens", "trainer", "archived, UTC", "reasons")
    if rows:
        console.print(_table(headers, rows))
    tokens = sum(entry.tokens for entry in entries)
    console.print(
        Text(f"{count(len(entries))} batches, {count(tokens)} tokens; {count(len(removed))} removed before")
    )


def print_batch(entry: Entry, batch: ArchivedBatch, place: str, console: Console) -> None:
    """What was decided about it, and its rollouts."""
    facts = {
        "batch": entry.batch,
        "step": str(batch.step),
        "state": batch.state.value,
        "reasons": "; ".join(batch.reasons) or UNKNOWN,
        "trainer": batch.trainer_version or UNKNOWN,
        "archived": f"{entry.when} UTC",
        "file": place,
    }
    for name, value in facts.items():
        console.print(Text.assemble((f"{name:<9}", "dim"), visible(value)), soft_wrap=True)
    console.print()
    headers = (
        "rollout",
        "prompt",
        "output",
        "in loss",
        "reward",
        "environment",
        "replica",
        "version",
        "engine",
        "off by",
    )
    console.print(_table(headers, [_rollout(rollout) for rollout in batch.rollouts]))
    console.print(
        Text(
            "engine: mean logprob that the engine reported; off by: mean distance to the trainer's, "
            "re-scored or else old",
            style="dim",
        )
    )


def _rollout(rollout: ArchivedRollout) -> list[Text]:
    learnt = rollout.mask or (True,) * len(rollout.token_ids)
    own = [value for value, used in zip(rollout.behavior_logprobs, learnt, strict=True) if used]
    beside = rollout.rescored_logprobs if rollout.rescored_logprobs is not None else rollout.old_logprobs
    gaps = [
        abs(mine - other)
        for mine, other, used in zip(rollout.behavior_logprobs, beside or (), learnt, strict=bool(beside))
        if used
    ]
    told = (
        rollout.id,
        count(len(rollout.prompt_token_ids)),
        count(len(rollout.token_ids)),
        count(sum(learnt)),
        UNKNOWN if rollout.reward is None else number(rollout.reward),
        rollout.environment or UNKNOWN,
        rollout.replica or UNKNOWN,
        rollout.version or UNKNOWN,
        _mean(own),
        _mean(gaps),
    )
    return [Text(visible(each)) for each in told]


def _mean(values: Sequence[float]) -> str:
    return number(math.fsum(values) / len(values)) if values else UNKNOWN


def print_tokens(rollout: ArchivedRollout, console: Console) -> None:
    """Every token of one rollout with all that is known of it."""
    given = [name for name in OPTIONAL_LOGPROBS if getattr(rollout, name) is not None]
    labels = [span.version.label for span in rollout.versions for _ in range(span.start, span.end)]
    columns = {
        "token": rollout.token_ids,
        "engine": [number(value, 6) for value in rollout.behavior_logprobs],
        **{
            name.removesuffix("_logprobs"): [number(value, 6) for value in getattr(rollout, name)]
            for name in given
        },
        **({"version": labels} if labels else {}),
        **({"in loss": ["yes" if used else "no" for used in rollout.mask]} if rollout.mask else {}),
    }
    prompt = visible(str(list(rollout.prompt_token_ids)))
    console.print(Text(f"\nrollout {visible(rollout.id)}, prompt {prompt}"), soft_wrap=True)
    rows = [
        [Text(str(index)), *(Text(visible(str(values[index]))) for values in columns.values())]
        for index in range(len(rollout.token_ids))
    ]
    console.print(_table(("index", *columns), rows))


def print_verified(
    directory: Path,
    entries: Sequence[Entry],
    findings: Sequence[Finding],
    unfinished: Sequence[str],
    console: Console,
) -> None:
    """What is damaged, by file; what is only unfinished; and how much is sound."""
    for finding in findings:
        told = f"{count(finding.batches)} batches" if finding.batches else "the index"
        console.print(
            Text.assemble(("damaged", "bold red"), f"  {visible(finding.says)} [{finding.code}, {told}]"),
            soft_wrap=True,
        )
    for what in unfinished:
        console.print(Text.assemble(("unfinished", "yellow"), f"  {visible(what)}"), soft_wrap=True)
    lost = sum(finding.batches for finding in findings)
    rollouts = sum(entry.rollouts for entry in entries)
    console.print(
        Text(
            f"{directory}: {count(len(entries) - lost)} of {count(len(entries))} batches are as they were written "
            f"({count(rollouts)} rollouts in all)"
        ),
        soft_wrap=True,
    )
