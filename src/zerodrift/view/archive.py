"""An archive in a terminal: which batches there are, what one of them holds, and what is damaged."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from zerodrift.records.archive.index import Entry, Removed, moment
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


def _print_table(headers: Sequence[str], rows: Sequence[Sequence[Text]], console: Console) -> None:
    """Without columns of which nothing is known. Lines are never cut, for names are copied."""
    told = [place for place in range(len(headers)) if any(row[place].plain != UNKNOWN for row in rows)]
    lines = [[Text(header, style="dim") for header in headers], *rows]
    widths = [max(line[place].cell_len for line in lines) for place in told]
    for line in lines if rows else ():
        cells = [line[place] for place in told]
        padded = [
            cell + Text(" " * (width - cell.cell_len)) for cell, width in zip(cells, widths, strict=True)
        ]
        shown = Text("  ").join(padded)
        shown.rstrip()
        console.print(shown, soft_wrap=True)


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
            Text(moment(entry.archived_at)),
            Text(visible("; ".join(entry.reasons)) or UNKNOWN),
        )
        for entry in entries
    ]
    headers = ("batch", "step", "state", "rollouts", "tokens", "trainer", "archived, UTC", "reasons")
    _print_table(headers, rows, console)
    tokens = sum(entry.tokens for entry in entries)
    console.print(
        Text(f"{_batches(len(entries))}, {count(tokens)} tokens; {count(len(removed))} removed before")
    )


def print_removed(removed: Sequence[Removed], console: Console) -> None:
    """One line for each batch that is gone, in the order they went."""
    rows = [
        (
            Text(each.batch[:SHORT]),
            Text(str(each.step)),
            Text(each.state, style=STYLES[each.state]),
            Text(count(each.rollouts)),
            Text(count(each.tokens)),
            Text(moment(each.archived_at)),
            Text(moment(each.removed_at)),
            Text(visible(each.why)),
        )
        for each in removed
    ]
    headers = ("batch", "step", "state", "rollouts", "tokens", "archived, UTC", "removed, UTC", "why")
    _print_table(headers, rows, console)
    console.print(Text(f"{_batches(len(rows))} removed"))


def _batches(number: int) -> str:
    return "1 batch" if number == 1 else f"{count(number)} batches"


def print_batch(entry: Entry, batch: ArchivedBatch, place: str, console: Console) -> None:
    """What was decided about it, and its rollouts."""
    facts = {
        "batch": entry.batch,
        "step": str(batch.step),
        "state": batch.state.value,
        "reasons": "; ".join(batch.reasons) or UNKNOWN,
        "trainer": batch.trainer_version or UNKNOWN,
        "archived": f"{moment(entry.archived_at)} UTC",
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
    _print_table(headers, [_rollout(rollout) for rollout in batch.rollouts], console)
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
    _print_table(("index", *columns), rows, console)


def print_verified(
    directory: Path,
    entries: Sequence[Entry],
    findings: Sequence[Finding],
    unfinished: Sequence[str],
    console: Console,
) -> None:
    """What is damaged, by file; what is only unfinished; and how much is sound."""
    for finding in findings:
        told = _batches(finding.batches) if finding.batches else "the index"
        console.print(
            Text.assemble(("damaged", "bold red"), f"  {visible(finding.message)} [{finding.code}, {told}]"),
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
