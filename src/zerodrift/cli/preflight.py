"""`zerodrift preflight`: may the training run start? One checklist, one page, one exit code."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerodrift.cli import console
from zerodrift.cli.audit import RUNS, ResetOption
from zerodrift.cli.bar import Bar, import_shown
from zerodrift.cli.console import JsonOption
from zerodrift.core.errors import ConfigError

if TYPE_CHECKING:
    from zerodrift.audit.history import RewardHistory
    from zerodrift.config.run import RunConfig
    from zerodrift.records.preflight import PreflightRecord


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; see `zerodrift init`.")],
    history: Annotated[
        Path | None, typer.Option(help="Compare rewards with these: a file of --record, or an earlier run.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Where audit and rewards pass, add the rewards to this history."),
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync/--no-sync", help="Push a weight update and follow it?")
    ] = True,
    reset_cache: ResetOption = True,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Run directory; an unfinished one is resumed.")] = None,
) -> None:
    """May the training run start? The checklist before it, as one command.

    doctor       the settings in CONFIG, and of the server that it names
    audit        is the engine the same policy as the trainer?
    weight-sync  does a weight update arrive, whole?
    rewards      are the engine's rewards the reference's? (validation.task)
    history      are they what they were? (--history)

    Each item has its evidence and what to type where it does not pass; the
    worst decides. Exit code: 0 pass or warn, 1 fail, 2 usage, 3 not judged.
    The run directory has it all as one page, preflight.html.

    $ zerodrift preflight run.yaml
    $ zerodrift preflight run.yaml --record rewards.jsonl
    $ zerodrift preflight run.yaml --history rewards.jsonl
    """
    from zerodrift.config.load import load

    resolved = load(config)
    _check_options(resolved, [history, record], sync=sync, reset_cache=reset_cache)
    compared, recorded = _histories(history, record)
    # Seconds of imports, and not before what can be refused without them.
    import_shown("zerodrift.audit.preflight")
    from zerodrift.audit.preflight import Preflight
    from zerodrift.cli.env import beside_a_run

    preflight = Preflight(
        path=config,
        config=resolved,
        directory=out or RUNS / time.strftime("preflight-%Y%m%d-%H%M%S"),
        sync=sync,
        resets_cache=reset_cache,
        history=compared,
        recorded=recorded,
        environment=beside_a_run(),
    )
    progress = Bar()
    with console.resumable(progress, preflight.directory, named=out is not None), progress:
        done = preflight.run(progress, shlex.join(["zerodrift", *sys.argv[1:]]))
    _publish(done, preflight.directory, as_json=as_json)
    if record is not None:
        _record(done, record, history)
    raise typer.Exit(done.status.exit_code)


def _check_options(config: "RunConfig", files: "list[Path | None]", *, sync: bool, reset_cache: bool) -> None:
    """What can be refused before anything is loaded."""
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set, and a preflight is of the policy that will be trained; write its checkpoint directory "
            "there (testbed:qwen3, the built-in model, to see what a preflight does)"
        )
    if any(files) and config.validation.task is None:
        raise ConfigError(
            "--history and --record are about rewards, and the configuration names no task; set validation.task"
        )
    if not sync and not reset_cache:
        raise ConfigError(
            "--no-reset-cache says how weights are updated, and with --no-sync none are; leave one of them out"
        )


def _histories(
    history: Path | None, record: Path | None
) -> "tuple[RewardHistory | None, RewardHistory | None]":
    """What to compare with, and what is in the file to add to; one that cannot be read or written is refused now."""
    from zerodrift.audit.history import RewardHistory, open_history

    compared = None if history is None else open_history(history)
    if record is None:
        return compared, None
    console.check_writable("--record", record)
    return compared, open_history(record) if record.stat().st_size else RewardHistory(record, ())


def _publish(done: "PreflightRecord", directory: Path, *, as_json: bool) -> None:
    """The report of the audit, where it got that far, the page, and the answer."""
    from zerodrift.records.directory import VERDICT
    from zerodrift.view.preflight import print_checklist, write_page
    from zerodrift.view.report import write_report

    if (directory / VERDICT).is_file():
        write_report(directory)
    write_page(directory)
    if as_json:
        console.say_json(done)
    else:
        print_checklist(done, console.stdout(), directory)


def _record(done: "PreflightRecord", path: Path, history: Path | None) -> None:
    """On stderr, so that the answer can be piped on."""
    from zerodrift.audit.history import why_not_recorded
    from zerodrift.records.rewards import append

    same = history is not None and history.exists() and path.samefile(history)
    if (why := why_not_recorded(done, to_the_same=same)) is not None:
        typer.echo(f"not recorded in {path}: {why}", err=True)
        return
    assert done.rewards is not None, "rewards that passed have been given"
    added = append(path, done.rewards)
    typer.echo(f"recorded in {path}" if added else f"recorded in {path} before", err=True)
