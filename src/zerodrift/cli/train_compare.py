"""`zerodrift train --compare A B`: the same short training under two configurations, over seeds, and whether they differ."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.text import Text

from zerodrift.cli import console
from zerodrift.cli.bar import Bar, import_shown
from zerodrift.cli.train_step import graceful, tell
from zerodrift.core.errors import ConfigError, ZerodriftError

if TYPE_CHECKING:
    from zerodrift.config.run import RunConfig
    from zerodrift.train.accused import Accused
    from zerodrift.train.compare import Planned
    from zerodrift.train.comparison import Band, ComparedRow, RunSeries, SidesJudged

COMPARED = "compare.json"
_MOST_SEEDS, _MOST_REASONS = 100, 4


def compare_command(
    names: Sequence[Path],
    configs: "Sequence[RunConfig]",
    seeds: int,
    out: Path,
    *,
    named: bool,
    as_json: bool,
) -> None:
    """Do what is not done yet, judge, ask blame where they differ; exit with 0, 1, or 3 where it cannot be told."""
    import_shown("zerodrift.train.compare")
    from zerodrift.train.compare import SIDES, differences, planned, series
    from zerodrift.train.comparison import judge

    if not 1 <= seeds <= _MOST_SEEDS:
        raise ConfigError(
            f"--seeds is {seeds}; give 3, or as many as there is time for (up to {_MOST_SEEDS})"
        )
    runs = planned(configs, seeds, out)
    _do_all(runs, out, named=named)
    found = {side: [series(run) for run in runs if run.side == side] for side in SIDES}
    judged = judge(*(found[side] for side in SIDES))
    differing = list(differences(*configs))
    sides = [_side(side, name, found[side], judged, runs) for side, name in zip(SIDES, names, strict=True)]
    _write(out, {"schema": 1, "sides": sides, "differing": differing, "judged": judged})
    if as_json:
        console.say((out / COMPARED).read_text(encoding="utf-8").rstrip())
    else:
        _print(sides, differing, judged, out)
    raise typer.Exit(judged.outcome.exit_code)


def _do_all(runs: "Sequence[Planned]", out: Path, *, named: bool) -> None:
    from zerodrift.train.compare import do, finished

    # Before any is begun: one that was made otherwise would be found after hours.
    left = [run for run in runs if not finished(run.directory, run.config)]
    with Bar() as bar, console.resumable(bar, out, named=named), graceful() as stopped:
        for place, run in enumerate(left, len(runs) - len(left) + 1):
            bar.part = f"{place}/{len(runs)} {run.name}: "
            bar.stage("warm up")
            if not do(run, lambda record, total: tell(bar, record, total), lambda: bool(stopped)) or stopped:
                sys.exit(128 + stopped[0])


def _side(
    side: str, name: Path, found: "Sequence[RunSeries]", judged: "SidesJudged", runs: "Sequence[Planned]"
) -> dict[str, Any]:
    """What is told of one side: its runs, what its monitor found, and blame's word where the sides differ."""
    from zerodrift.records.verdict import Outcome

    told: dict[str, Any] = {
        "side": side,
        "config": str(name),
        "runs": found,
        "blame": None,
        "not_blamed": None,
    }
    if judged.outcome is not Outcome.FAIL:
        return told
    from zerodrift.train.accused import accused

    first = next(run for run in runs if run.side == side)
    with Bar() as bar:
        bar.stage(f"blame {side}")
        try:
            told["blame"] = accused(first.directory, first.directory / "blame", judged.since or 0)
        except ZerodriftError as error:
            # That they differ stands, whatever a reference can or cannot compute of it.
            told["not_blamed"] = str(error)
    return told


def _write(out: Path, record: dict[str, Any]) -> None:
    from zerodrift.records.codec import write_atomically

    write_atomically(out / COMPARED, msgspec.json.format(msgspec.json.encode(record)) + b"\n")


# --- for people ---------------------------------------------------------------------------------------------------------

_HEADLINES = {"PASS": ("SAME", "green"), "FAIL": ("DIFFERENT", "red"), "INCONCLUSIVE": ("UNKNOWN", "yellow")}


def _print(
    sides: Sequence[dict[str, Any]],
    differing: Sequence[tuple[str, str, str]],
    judged: "SidesJudged",
    out: Path,
) -> None:
    from zerodrift.view.text import copyable, table_of
    from zerodrift.view.visible import visible

    page = console.stdout()
    word, colour = _HEADLINES[judged.outcome]
    page.print(Text.assemble((word, f"bold {colour}"), f"  {judged.message}"), soft_wrap=True)
    for side in sides:
        page.print(Text(f"{side['side']}  {visible(side['config'])}, {_runs(side['runs'])}"), soft_wrap=True)
    page.print()
    rows = [[Text(visible(cell)) for cell in each] for each in differing]
    page.print(
        table_of(("set otherwise", "A", "B"), rows) if rows else Text("nothing is set otherwise but seeds")
    )
    page.print()
    if judged.rows:
        headers = ("", "A", "B", "B less A", "seen from", "p")
        page.print(table_of(headers, [_row(row) for row in judged.rows]))
        page.print()
        page.print(Text(_how(sides, judged)))
        page.print()
    for side in sides:
        for line in _explained(side):
            page.print(Text(visible(line)), soft_wrap=True)
    copyable("all numbers, step by step", str(out / COMPARED), page)


def _runs(runs: "Sequence[RunSeries]") -> str:
    halted = sum(run.halted for run in runs)
    told = f"{len(runs)} runs of {min(run.steps for run in runs)} steps, seeds {', '.join(str(run.seed) for run in runs)}"
    return f"{told}; {halted} halted by the monitor" if halted else told


def _row(row: "ComparedRow") -> list[Text]:
    from zerodrift.view.notation import number, signed

    title = row.title if row.of == "all steps" else f"{row.title},\n{row.of}"
    bands = band_in_words(row.first), band_in_words(row.second)
    cells = title, *bands, signed(row.difference), number(row.seen_from), number(row.p_value, 2)
    return [Text(cell, style="bold red" if row.differs else "") for cell in cells]


def band_in_words(band: "Band") -> str:
    """The mean, and below it the least and the largest run where they are not one number."""
    from zerodrift.view.notation import number

    if band.low == band.high:
        return number(band.mean)
    return f"{number(band.mean)}\n[{number(band.low, 2)}, {number(band.high, 2)}]"


def _how(sides: Sequence[dict[str, Any]], judged: "SidesJudged") -> str:
    from zerodrift.view.notation import number

    counts = [len(side["runs"]) for side in sides]
    return (
        f"Means over {judged.steps} steps, and of the seeds' own means the least and the largest. A difference counts where p, adjusted "
        f"for all that was asked, is at most 0.05 and where it is large enough to matter; one of the size under `seen from` is found "
        f"19 times in 20. p is Student's, of {counts[0]} and {counts[1]} means of whole runs: by permuting runs it could not be below "
        f"{number(judged.least_rank_p, 2)}."
    )


def _explained(side: dict[str, Any]) -> list[str]:
    """What the monitor said while it ran, and what blame says of the rollouts afterwards."""
    accused, refused = side["blame"], side["not_blamed"]
    lines = [f"{side['side']}  monitor: {monitor_in_words(side['runs'])}"]
    if refused is not None:
        lines.append(f"{side['side']}  blame could not be asked: {refused}")
    return [*lines, *([] if accused is None else [f"{side['side']}  blame: {_blamed(accused)}"])]


def monitor_in_words(runs: "Sequence[RunSeries]") -> str:
    """What it found in how many batches, the most frequent first."""
    reasons: Counter[str] = Counter()
    for run in runs:
        reasons.update(run.reasons)
    batches = sum(run.steps for run in runs)
    found = ", ".join(f"{reason} in {count}" for reason, count in reasons.most_common(_MOST_REASONS))
    return f"{found} of {batches} batches" if found else f"nothing in {batches} batches"


def _blamed(accused: "Accused") -> str:
    told = f"{accused.outcome} of {accused.rollouts} rollouts of step {accused.version}"
    if not accused.causes:
        return told
    return f"{told}, {', '.join(accused.causes)}: {accused.evidence}; {accused.fix}"
