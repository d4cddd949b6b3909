"""Where an audit says how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Where an audit says how far it is; the command line draws a bar."""

    def stage(self, name: str) -> None:
        """A new stage begins."""
        ...

    def step(self, done: int, total: int) -> None:
        """So much of the stage is done."""
        ...

    def note(self, text: str) -> None:
        """What somebody who waits wants to know before it begins."""
        ...


class Silent:
    """Says nothing."""

    def stage(self, name: str) -> None:
        """Nothing."""

    def step(self, done: int, total: int) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""
