"""What the monitor hands to an archive, and what it asks of one. Storage is somebody else's (`records/`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from zerodrift.monitor.decision import Decision


@dataclass(frozen=True)
class ArchivedBatch:
    """One batch as `observe` got it, with what was decided."""

    step: int
    decision: Decision
    given: Mapping[str, Any]
    """Arguments of `observe` by name, those that were given, arrays on the host."""


class Archive(Protocol):
    """Anything that keeps batches."""

    def append(self, batch: ArchivedBatch) -> None:
        """Return once the batch is durable; raise where it cannot be."""
