"""`zerodrift train --story`: the V0 → V1 story as trainings, in pieces that are done once each, and its page."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from zerodrift.cli import console
from zerodrift.cli.bar import Bar, import_shown
from zerodrift.cli.train_compare import band_in_words, monitor_in_words
from zerodrift.cli.train_step import graceful, tell
from zerodrift.records.verdict import Outcome

if TYPE_CHECKING:
    from zerodrift.train.accused import Accused
    from zerodrift.train.comparison import RunSeries, SidesJudged
    from zerodrift.train.receipted import Receipted
    from zerodrift.train.story import StoryPiece
    from zerodrift.view.story import StoryLine

RECORD, PAGE = "story.json", "story.html"


def story_command(
    seeds: int, only: Sequence[str], settings: Sequence[str], out: Path, *, as_json: bool
) -> None:
    """Train what is not trained yet; then judge, ask blame, and write the page of all that is there."""
    import_shown("zerodrift.train.compare")
    from zerodrift.train.compare import finished
    from zerodrift.train.story import pieces

    _do_all(pieces(seeds, out, settings, only), out)
    # Also what was asked for before: the page is of all pieces that are there.
    done = [piece for piece in pieces(seeds, out, settings) if finished(piece.directory, piece.config)]
    record = _judged(done)
    _write(out, done, record)
    if as_json:
        console.say((out / RECORD).read_text(encoding="utf-8").rstrip())
    else:
        _print(record, out)


def _do_all(asked: "Sequence[StoryPiece]", out: Path) -> None:
    from zerodrift.train.compare import do, finished

    left = [piece for piece in asked if not finished(piece.directory, piece.config)]
    with Bar() as bar, console.resumable(bar, out, named=True), graceful() as stopped:
        for place, piece in enumerate(left, len(asked) - len(left) + 1):
            bar.part = f"{place}/{len(asked)} {piece.name}: "
            bar.stage("warm up")
            if (
                not do(piece, lambda record, total: tell(bar, record, total), lambda: bool(stopped))
                or stopped
            ):
                sys.exit(128 + stopped[0])


@dataclass(frozen=True, kw_only=True)
class StoryKind:
    """One condition, as it was found."""

    name: str
    title: str
    faults: tuple[str, ...]
    against: str
    runs: "Sequence[RunSeries]"
    judged: "SidesJudged | None"
    """None of what others are held against, and where that was not trained."""
    blame: "Accused"
    receipt: "Receipted"
    """Of the first run, as of all that is told beside the numbers."""


def _judged(done: "Sequence[StoryPiece]") -> list[StoryKind]:
    from zerodrift.train.accused import accused
    from zerodrift.train.compare import series
    from zerodrift.train.comparison import judge
    from zerodrift.train.receipted import receipted
    from zerodrift.train.story import CONDITIONS, FROM

    found = {
        each.name: tuple(series(piece) for piece in done if piece.condition is each) for each in CONDITIONS
    }
    kinds = []
    with Bar() as bar:
        for condition in (each for each in CONDITIONS if found[each.name]):
            bar.stage(f"judge {condition.name}")
            against = found[condition.against] if condition.name != condition.against else ()
            first = next(piece for piece in done if piece.condition is condition)
            kinds.append(
                StoryKind(
                    name=condition.name, title=condition.title, faults=condition.faults, against=condition.against,
                    runs=found[condition.name], judged=judge(against, found[condition.name]) if against else None,
                    blame=accused(first.directory, first.directory / "blame", FROM),
                    receipt=receipted(first.directory, first.directory / "receipt"),
                )
            )  # fmt: skip
    return kinds


def _write(out: Path, done: "Sequence[StoryPiece]", kinds: Sequence[StoryKind]) -> None:
    from zerodrift.records.codec import write_atomically
    from zerodrift.view.story import render_story

    record = {"schema": 1, "kinds": kinds}
    write_atomically(out / RECORD, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    notes = [f"{len(done)} trainings; zerodrift train --story --out {out} does those that are missing"]
    write_atomically(out / PAGE, render_story([_told(kind) for kind in kinds], notes).encode())


def _told(kind: StoryKind) -> "StoryLine":
    from zerodrift.train.comparison import QUANTITIES, band
    from zerodrift.view.story import StoryLine

    steps = min(run.steps for run in kind.runs)
    shown = [
        each.name for each in QUANTITIES if any(value is not None for value in kind.runs[0].values[each.name])
    ]
    return StoryLine(
        name=kind.name,
        title=kind.title,
        runs=f"{len(kind.runs)} runs of {steps} steps",
        differs=_differs(kind),
        monitor=monitor_in_words(kind.runs),
        receipt=_receipt(kind),
        blame=_blame(kind),
        steps={name: band(kind.runs, name, steps).steps for name in shown},
    )


def _differs(kind: StoryKind) -> str:
    if kind.judged is None:
        return "–"
    return f"{kind.judged.message} ({kind.against})"


def _receipt(kind: StoryKind) -> str:
    told = kind.receipt
    return f"{told.arrival}: {told.cause or told.message}"


def _blame(kind: StoryKind) -> str:
    causes = ", ".join(kind.blame.causes) or ("nothing" if kind.blame.outcome is Outcome.PASS else "no cause")
    return f"{kind.blame.outcome}: {causes}"


_COLUMNS = ("reward", "clip_rate", "ess", "kl", "mismatch")


def _print(kinds: Sequence[StoryKind], out: Path) -> None:
    from zerodrift.view.text import copyable, table_of
    from zerodrift.view.visible import visible

    page = console.stdout()
    headers = ("", "reward", "clip rate", "ESS", "KL", "mismatch")
    page.print(table_of(headers, [[Text(kind.name), *_numbers(kind)] for kind in kinds]))
    page.print()
    for kind in kinds:
        page.print(Text(kind.name, style="bold"))
        for word, told in (
            ("differs", _differs(kind)),
            ("monitor", monitor_in_words(kind.runs)),
            ("receipt", _receipt(kind)),
            ("blame", _blame(kind)),
        ):
            page.print(Text(f"  {word:8} {visible(told)}"), soft_wrap=True)
    page.print()
    copyable("figures", str(out / PAGE), page)


def _numbers(kind: StoryKind) -> list[Text]:
    from zerodrift.train.comparison import band

    steps = min(run.steps for run in kind.runs)
    return [Text(band_in_words(band(kind.runs, name, steps))) for name in _COLUMNS]
