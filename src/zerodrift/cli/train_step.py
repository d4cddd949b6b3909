"""One step of a training, beside its bar."""

from typing import TYPE_CHECKING

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
