"""A progress bar on stderr: which stage, how far, how long it will take. Silent where nobody watches."""

from typing import Self

from rich import progress
from rich.console import Console

from zerodrift.cli import console


class Bar:
    """One line that changes with the stage."""

    def __init__(self) -> None:
        """Drawn only on a terminal; a log file gets nothing."""
        stderr = Console(stderr=True)
        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description:18}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=stderr,
            transient=True,
            # Rich would still end with an empty line.
            disable=not stderr.is_terminal,
        )
        self._task = self._bar.add_task("start", total=None)

    def stage(self, name: str) -> None:
        """A new stage begins; its length is not known yet."""
        self._bar.reset(self._task, description=name, total=None)

    def step(self, done: int, total: int) -> None:
        """So much of the stage is done."""
        self._bar.update(self._task, completed=done, total=total)

    def note(self, text: str) -> None:
        """Also where no bar is drawn: a log that ends here says what for."""
        console.note(text)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
