"""What a person sees: answers on stdout, trouble on stderr, so that either can be piped alone."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from zerodrift.core.errors import ConfigError, MissingExtra, OutOfMemory, ZerodriftError
from zerodrift.core.lazy import LOCAL
from zerodrift.core.memory import ran_out

JsonOption = Annotated[bool, typer.Option("--json", help="As JSON, for a program.")]


def say(text: str) -> None:
    """An answer, as it is: never wrapped or coloured, for a program may be reading."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        _nobody_reads()


def say_json(record: Any) -> None:
    """A record for a program, indented for people who look at it all the same."""
    say(msgspec.json.format(msgspec.json.encode(record)).decode())


def note(text: str) -> None:
    """What was done otherwise than one might think, and is no trouble."""
    typer.echo(f"note: {text}", err=True)


def stdout() -> Console:
    """Where answers with colour and tables go."""
    return _Answers(highlight=False)


class _Answers(Console):
    """A reader that has seen enough (`| head -1`) changes no verdict: rich would exit with 1, which says FAIL."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _nobody_reads()


def settle() -> None:
    """Write what is still held back, before the exit code is settled; Python would exit with 120 where nobody reads."""
    # A daemon's standard output may have been closed before we began.
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _nobody_reads()


def _nobody_reads() -> None:
    """From here on answers go nowhere; what is held back included."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class Place(Protocol):
    """Something that knows how far a run is."""

    @property
    def place(self) -> str:
        """As in `sample, 684 of 2,000`."""
        ...


@contextmanager
def resumable(
    progress: Place, directory: Path, *, named: bool, command: Callable[[], str] = str
) -> Iterator[None]:
    """A run that is interrupted says where it stopped and what to type to go on: `command` by then, or what was typed.

    `named`: --out was given.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        again = "repeat the same command" if named else f"repeat the command with --out {directory}"
        note(f"stopped at {progress.place}; {command() or again} to go on")
        raise


def complain(label: str, message: str) -> None:
    """Trouble, as one paragraph: wrapped at words on a terminal, in one line anywhere else.

    Line breaks of the message stay, for it may end with the last lines of an engine's log.
    """
    console = Console(stderr=True, highlight=False)
    # Text, not markup: a message may hold brackets, which markup would swallow.
    paragraph = Text.assemble(("error", "bold red"), f" [{label}] {message.strip()}")
    console.print(paragraph, soft_wrap=not console.is_terminal)


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written before there is anything to write; a new one is made, and is empty."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written ({error.strerror}); choose another file"
        ) from error


def report(error: Exception, *, debug: bool) -> int:
    """Tell the user about `error`, and return what to exit with."""
    if debug:
        typer.echo("".join(traceback.format_exception(error)), err=True)
    if isinstance(error, ZerodriftError):
        complain(error.code, str(error))
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "").partition(".")[0]) in LOCAL:
        needed = f"this needs {missing}, which is not installed: pip install 'zerodrift[local]'"
        complain(MissingExtra.code, needed)
        return MissingExtra.exit_code
    if ran_out(error):
        told = str(error).partition("\n")[0]
        cure = "compute the reference in less (--set validation.reference_dtype=bfloat16), on the other device, or ask for less"
        complain(OutOfMemory.code, f"{told or type(error).__name__}; {cure}")
        return OutOfMemory.exit_code
    if isinstance(error, OSError) and error.strerror:
        # A full disk, a directory that may not be written: nothing that a traceback would help with.
        where = f"{error.filename}: " if error.filename else ""
        complain("io", f"{where}{error.strerror}; check the path, its permissions and the space left")
        return 2
    hint = (
        ""
        if debug
        else "; run it again as `zerodrift --debug …` and report the traceback, which is a bug of ours"
    )
    complain("internal", f"{type(error).__name__}: {error}{hint}")
    return 70  # EX_SOFTWARE of sysexits.h: our fault, not the user's
