"""`zerodrift train --replay`: a recorded run once more, its digests compared, or without a fault that was planted in it."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zerodrift.cli import console
from zerodrift.cli.bar import Bar
from zerodrift.cli.train_step import tell
from zerodrift.core.errors import ConfigError

if TYPE_CHECKING:
    from zerodrift.train.again import DoneAgain
    from zerodrift.train.records import StepRecord


def replay_command(
    directory: Path, until: int | None, without: Sequence[str], out: Path | None, *, as_json: bool
) -> None:
    """Token by token where the engine was exact; of one with planted faults the whole run, beside the recorded one."""
    from zerodrift.train.records import RunFiles
    from zerodrift.train.rollouts import measured_here

    if without or measured_here(RunFiles(directory).header().config):
        _again(directory, until, without, out, as_json=as_json)
    else:
        _drawn_again(directory, until, as_json=as_json)


def _drawn_again(directory: Path, until: int | None, *, as_json: bool) -> None:
    from zerodrift.train.setup import replay
    from zerodrift.train.summary import summary_of

    with Bar() as bar, _scratch(None) as scratch:
        bar.stage("read the run")
        training = replay(directory, scratch)
        total = len(training.steps) if until is None else until
        if total > len(training.steps):
            training.close()
            raise ConfigError(
                f"{directory} has {len(training.steps)} steps, and --until {until} asks for more"
            )
        try:
            training.run(total, lambda record: tell(bar, record, total))
        finally:
            training.close()
    found = summary_of(training.steps[:total])
    if as_json:
        console.say_json(found)
        return
    console.say(
        f"{found.steps} steps done again: equal digests at every step, {found.tokens:,} of {found.tokens:,} tokens drawn "
        f"again with the same bits\nweights {found.digest[:16]}"
    )


def _again(
    directory: Path, until: int | None, without: Sequence[str], out: Path | None, *, as_json: bool
) -> None:
    from zerodrift.train.again import done_again

    with Bar() as bar, _scratch(out) as scratch:
        bar.stage("read the run")
        found = done_again(
            directory, scratch, until, without=without, tell=lambda record, total: tell(bar, record, total)
        )
    if as_json:
        console.say_json(found)
        return
    console.say(_parted(found, without) if without else _equal(found))


def _equal(found: "DoneAgain") -> str:
    return (
        f"{len(found.steps)} steps done again, planted faults included: equal digests at every step\n"
        f"weights {found.steps[-1].digest[:16]}"
    )


def _parted(found: "DoneAgain", without: Sequence[str]) -> str:
    named = ", ".join(without)
    if found.parted is None:
        return f"{len(found.steps)} steps done again without {named}: equal digests at every step, so it changed nothing"
    since = f"step {found.parted}" if found.parted else "the first step"
    rows = [
        ("with it", _told(found.recorded[found.parted :])),
        ("without", _told(found.steps[found.parted :])),
    ]
    return "\n".join(
        [
            f"{len(found.steps)} steps done again without {named}: equal digests before {since}, others from there on",
            *(f"  {name:8}  {text}" for name, text in rows),
        ]
    )


def _told(steps: "Sequence[StepRecord]") -> str:
    """From the step at which they parted."""
    from zerodrift.train.summary import summary_of

    found = summary_of(steps)
    reward = sum(step.reward for step in steps) / len(steps)
    mismatch = "unknown" if found.mismatch is None else f"{found.mismatch:.2g} nats"
    return (
        f"reward {reward:.3f}, mismatch {mismatch}, {found.kept_back} of {found.steps} batches kept back, "
        f"weights {found.digest[:16]}"
    )


@contextmanager
def _scratch(out: Path | None) -> Iterator[Path]:
    """A directory that is kept where it is named."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="zerodrift-replay-") as scratch:
        yield Path(scratch) / "run"
