"""One step of a training, beside its bar, and its end after the step that is under way."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zerodrift.cli import console
from zerodrift.cli.bar import Bar

if TYPE_CHECKING:
    from zerodrift.train.records import StepRecord


def tell(bar: Bar, record: "StepRecord", total: int) -> None:
    """What changes from step to step."""
    parts = [f"reward {record.reward:.2f}"]
    parts += [] if record.kl is None else [f"KL {record.kl:.2g}"]
    parts += [] if record.ess is None else [f"ESS {record.ess:.2f}"]
    parts += [f"mismatch {record.mismatch:.2g}"] if record.mismatch else []
    parts += [f"lag {record.lag}", f"{record.tokens / record.seconds:.0f} tokens/s"]
    parts += [] if record.trained else [str(record.state)]
    bar.describe("  ".join(parts))
    bar.step(record.step + 1, total)


@contextmanager
def graceful() -> Iterator[list[int]]:
    """The first signal ends the training after the step that is under way; the second one at once."""
    stopped: list[int] = []

    def stop(number: int, _frame: object) -> None:
        if stopped:
            sys.exit(128 + number)
        stopped.append(number)
        console.note("the step that is under way is finished and kept; once more ends it now")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
