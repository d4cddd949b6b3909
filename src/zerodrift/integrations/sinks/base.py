"""What a sink is, and how several are fed: one that fails is counted and named, and never stops a training."""

import logging
from collections.abc import Sequence
from typing import Protocol

from zerodrift.monitor.decision import Decision

logger = logging.getLogger("zerodrift.sinks")


class Sink(Protocol):
    """Takes every decision, in order."""

    def emit(self, decision: Decision) -> None:
        """Send one. What it raises is counted, and the next decision comes all the same."""

    def close(self) -> None:
        """Send what is left, let go of files and sockets. Nothing is emitted afterwards."""


class Sinks:
    """Several as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        """In the order in which they are fed."""
        self._sinks = tuple(sinks)
        self.failures = 0
        """Calls that raised, of all sinks together."""

    def emit(self, decision: Decision) -> None:
        """To each, whatever becomes of the others."""
        for sink in self._sinks:
            try:
                sink.emit(decision)
            # A disk may be full and a library may raise anything; the decision stands without its record.
            except Exception as error:
                self._failed(sink, "emit", error)

    def close(self) -> None:
        """Each."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._failed(sink, "close", error)

    def _failed(self, sink: Sink, what: str, error: Exception) -> None:
        self.failures += 1
        # The class alone: a message may hold an address, and an address a secret.
        logger.warning(
            "%s.%s failed with %s (%d failures so far)",
            type(sink).__name__,
            what,
            type(error).__name__,
            self.failures,
        )
