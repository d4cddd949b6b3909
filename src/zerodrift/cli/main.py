"""The command `zerodrift`: one file per verb, each importing what it needs only when it runs.

Exit codes are a contract: 0 done or passed, 1 gate failed, 2 wrong usage, 3 could not be judged, 70 our own
bug, 130 interrupted, 143 or 129 told to end (SIGTERM, SIGHUP).
"""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zerodrift import __version__
from zerodrift.cli import (
    archive,
    audit,
    baseline,
    bench,
    bisect,
    blame,
    console,
    demo,
    doctor,
    env,
    init,
    preflight,
    serve,
    sync,
    train,
    view,
)

TOLD_TO_END = (signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = (130, *(128 + number for number in TOLD_TO_END))
Command = Callable[..., None] | typer.Typer
"""A function, or a command line of its own where the verb has verbs."""

# Help lists them in this order.
COMMANDS: Mapping[str, Command] = {
    "audit": audit.app,
    "preflight": preflight.command,
    "blame": blame.command,
    "doctor": doctor.command,
    "bisect": bisect.command,
    "demo": demo.command,
    "train": train.command,
    "baseline": baseline.app,
    "serve": serve.command,
    "view": view.command,
    "archive": archive.app,
    "sync": sync.app,
    "bench": bench.command,
    "init": init.command,
    "env": env.command,
}


@dataclass(slots=True)
class GlobalOptions:
    """What the global options decided; one per run of the command line."""

    debug: bool = False


def make_app(commands: Mapping[str, Command]) -> typer.Typer:
    """A command line with these verbs."""
    order = list(commands)

    class InOrder(TyperGroup):
        # Typer lists functions before command lines of their own, and people look for `audit` first.
        def list_commands(self, _context: Any) -> list[str]:
            return order

    app = typer.Typer(
        cls=InOrder,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,  # errors are told by console.report
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for verb, what in commands.items():
        if isinstance(what, typer.Typer):
            app.add_typer(what, name=verb)
        else:
            app.command(verb)(what)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        console.say(f"zerodrift {__version__}")
        raise typer.Exit


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Rollouts your RL trainer can trust.

    zerodrift tells whether the log-probabilities of an inference engine are
    those of the policy that the trainer differentiates, names the cause where
    they are not, and says what to type to fix it.

    Start with an audit of the built-in model, then one of your own server:

    $ zerodrift audit
    $ zerodrift audit ./model --engine vllm --url http://127.0.0.1:8000
    """
    context.ensure_object(GlobalOptions).debug = debug


app = make_app(COMMANDS)


def main(arguments: Sequence[str] | None = None, application: typer.Typer = app) -> None:
    """Run the command line and exit; `arguments` are those of the process unless given."""
    session = GlobalOptions()
    if arguments is None:
        # As an exit, not as an end on the spot: a server that we started must not outlive a job that was cancelled.
        for number in TOLD_TO_END:
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        application(args=arguments, prog_name="zerodrift", obj=session)
    except SystemExit as stop:
        if stop.code in INTERRUPTED:  # Typer turns Ctrl-C into 130, without a word
            console.complain("interrupted", "stopped before the end")
        raise
    except Exception as error:  # everything: report tells known errors from bugs of ours
        sys.exit(console.report(error, debug=session.debug))
    finally:
        console.settle()


if __name__ == "__main__":
    main()
