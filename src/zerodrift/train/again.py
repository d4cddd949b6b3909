"""A recorded run with planted faults, from its beginning once more: all of them again, or some of them taken out.

Its numbers are not the trainer's, so no token can be drawn again from them alone; but the schedule follows from the
configuration, and so do the bits of every step. Without a fault the weights are the recorded ones up to the step at which it was
planted, and what they are from there on is what it did.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from zerodrift.core.errors import BitsDiffer, ConfigError, TrainingHalted
from zerodrift.train.loop import Training
from zerodrift.train.planted import without_faults
from zerodrift.train.records import RunFiles, StepRecord
from zerodrift.train.setup import begin


class DoneAgain(msgspec.Struct, frozen=True):
    """A run beside the recorded one."""

    recorded: tuple[StepRecord, ...]
    steps: tuple[StepRecord, ...]
    parted: int | None
    """First step whose weights are others; None where none are."""


def done_again(
    directory: Path,
    scratch: Path,
    until: int | None = None,
    *,
    without: Sequence[str] = (),
    tell: Callable[[StepRecord, int], None] = lambda record, total: None,
) -> DoneAgain:
    """`until` steps of the run in `directory`, made anew in `scratch`, and held against the record.

    Weights that are others where nothing was taken out, or before the step of what was, raise `exact/bits-differ`.
    """
    files = RunFiles(directory)
    header, recorded = files.header(), files.steps()
    total = len(recorded) if until is None else until
    planted_at = header.config.train.inject_from
    if total > len(recorded):
        raise ConfigError(f"{directory} has {len(recorded)} steps, and --until {until} asks for more")
    if without and total <= planted_at:
        raise ConfigError(
            f"{', '.join(without)} was planted at step {planted_at}, and {total} steps end before; raise --until"
        )
    config = without_faults(header.config, without) if without else header.config
    training = begin(config, scratch)
    found: list[StepRecord] = []
    parted: list[int] = []

    def compare(record: StepRecord) -> None:
        found.append(record)
        if not parted and record.digest != recorded[record.step].digest:
            if not without or record.step < planted_at:
                raise BitsDiffer(
                    f"step {record.step} was recorded with weights {recorded[record.step].digest}, and done again it has "
                    f"{record.digest}: the record was changed, or something computes otherwise than it did"
                )
            parted.append(record.step)
        tell(record, total)

    try:
        header.require_same_origin(training.files.header())
        _run(training, total, compare)
    finally:
        training.close()
    return DoneAgain(tuple(recorded[:total]), tuple(found), parted[0] if parted else None)


def _run(training: Training, until: int, tell: Callable[[StepRecord], None]) -> None:
    """Halts are passed over, as by somebody who looked and went on: the record has what came after them."""
    while training.step < until:
        try:
            training.run(until, tell)
        except TrainingHalted:
            assert training.monitor is not None, "only a monitor halts"
            training.monitor.half_open()
