"""What is written of a decision may fail, and must not keep the decision from being acted on.

A full disk is found by whoever writes a bad batch to it. So an error waits until the actions have run and the decision was
told, and is raised then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from zerodrift.monitor.decision import Decision


class Writes:
    """Of one decision: each is tried, whatever became of the others."""

    def __init__(self) -> None:
        """None has failed yet."""
        self._failed: list[Exception] = []

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keep the error for later."""
        try:
            yield
        # An archive of the user's may raise anything, and the actions must still run.
        except Exception as error:
            self._failed.append(error)

    def raise_first(self, decision: Decision, leave: SystemExit | None = None) -> None:
        """The first that failed, with the others and what stands nevertheless as its notes; or that an action wants to `leave`."""
        if leave is not None:
            raise leave from (self._failed[0] if self._failed else None)
        if not self._failed:
            return
        first, *others = self._failed
        for other in others:
            first.add_note(f"and {type(other).__name__}: {other}")
        first.add_note(
            f"step {decision.step} was judged {decision.state} all the same and its actions have run (`Monitor.last`); "
            "it is not judged again: go on with the next one"
        )
        raise first
