"""Scalars for TensorBoard, where torch and tensorboard are installed."""

from importlib import import_module
from pathlib import Path

from zerodrift.core.errors import MissingExtra
from zerodrift.integrations.metrics import metrics_of
from zerodrift.monitor.decision import Decision

WRITER = "torch.utils.tensorboard"


class TensorBoard:
    """One event file per run, below `directory`."""

    def __init__(self, directory: str | Path) -> None:
        """Refused here where nothing could be written, not at the first step of a night."""
        try:
            module = import_module(WRITER)
        except ImportError as error:
            raise MissingExtra(
                f"{WRITER} cannot be imported ({error}): pip install torch tensorboard, or use the JSONL sink"
            ) from error
        self._writer = module.SummaryWriter(str(directory))

    def emit(self, decision: Decision) -> None:
        """A scalar for each number, and why, as text, where there is something to say."""
        for name, value in metrics_of(decision).items():
            self._writer.add_scalar(name, value, decision.step)
        if decision.reasons:
            message = "\n\n".join(f"`{reason.code}` {reason.message}" for reason in decision.reasons)
            self._writer.add_text("zerodrift/why", message, decision.step)
        self._writer.flush()

    def close(self) -> None:
        """Nothing is lost: every step was flushed."""
        self._writer.close()
