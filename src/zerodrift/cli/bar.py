"""How far is it? A bar on a terminal; in a log, a line where a stage takes long."""

import time
from importlib import import_module
from typing import Self

from rich import progress
from rich.console import Console
from rich.text import Text

from zerodrift.cli import console

QUIET_S = 30
"""So long may a log be silent: a job of a minute has two lines, one of an hour 120."""


class _Count(progress.ProgressColumn):
    """`684/2,000`; nothing where it is not known how many there will be."""

    def render(self, task: progress.Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:,.0f}/{task.total:,.0f}")


class Bar:
    """One line that changes with the stage."""

    part = ""
    """Before the name of every stage, where there are several runs: `2/4 `."""

    def __init__(self) -> None:
        """Drawn only on a terminal."""
        stderr = Console(stderr=True)
        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description:18}"),
            progress.BarColumn(),
            _Count(),
            progress.TimeRemainingColumn(),
            console=stderr,
            transient=True,
            # Rich would still end with an empty line.
            disable=not stderr.is_terminal,
        )
        self._task = self._bar.add_task("start", total=None)
        self._stage, self._done = "start", ""
        self._logged = time.monotonic()

    @property
    def place(self) -> str:
        """Where it is, as in `sample, 684 of 2,000`."""
        return ", ".join(filter(None, (self._stage, self._done)))

    def stage(self, name: str) -> None:
        """A new stage begins; its length is not known yet."""
        self._stage, self._done = f"{self.part}{name}", ""
        self._bar.reset(self._task, description=self._stage, total=None)
        self._log()

    def describe(self, text: str) -> None:
        """What the stage shows by now; it goes on."""
        self._stage = f"{self.part}{text}"
        self._bar.update(self._task, description=self._stage)

    def step(self, done: int, total: int) -> None:
        """So much of the stage is done."""
        self._done = f"{done:,} of {total:,}"
        self._bar.update(self._task, completed=done, total=total)
        self._log()

    def note(self, text: str) -> None:
        """Also where no bar is drawn: a log that ends here says what for."""
        console.note(text)

    def _log(self) -> None:
        if self._bar.disable and time.monotonic() - self._logged >= QUIET_S:
            self._logged = time.monotonic()
            console.note(f"running: {self.place}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def import_shown(module: str) -> None:
    """Import what takes seconds (torch), where an empty screen would look like a command that hangs."""
    with Bar() as bar:
        bar.stage("start")
        import_module(module)
