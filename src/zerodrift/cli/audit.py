"""`zerodrift audit`: is this engine the same policy as the trainer?"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerodrift.cli import console
from zerodrift.cli.bar import Bar

if TYPE_CHECKING:
    from zerodrift.config.run import RunConfig


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint directory or testbed:NAME. Default: testbed:qwen3.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="reference or vllm.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of a running server.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; see `zerodrift init`.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, as section.key=value. Repeatable.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with `prompt` or `messages`.")] = None,
    temperature: Annotated[float | None, typer.Option(help="What the trainer samples at.")] = None,
    trials: Annotated[int | None, typer.Option(help="Sampled sequences to judge by.")] = None,
    sync: Annotated[bool, typer.Option("--sync", help="Also push a weight update and follow it.")] = False,
    reset_cache: Annotated[
        bool, typer.Option("--reset-cache/--no-reset-cache", help="Does your update reset the prefix cache?")
    ] = True,
    inject: Annotated[
        str | None, typer.Option(help="Plant a fault, CAUSE[:VARIANT], to see it found. `list` lists them.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; an unfinished one is resumed.")] = None,
) -> None:
    """Is this engine the same policy as the trainer, and if not, why?

    Samples from the engine, scores the same tokens with vanilla transformers,
    measures the rounding floor, and names the cause of what is left, with the
    fix to type. Exit code: 0 pass, 1 fail, 2 usage, 3 could not judge.

    $ zerodrift audit
    $ zerodrift audit ./model --engine vllm --url http://127.0.0.1:8000
    $ zerodrift audit --inject semantic/raw-logprobs --temperature 0.7
    """
    from zerodrift.audit.session import Session, command_line
    from zerodrift.view.report import write_report
    from zerodrift.view.text import print_verdict

    if inject == "list":
        _list_faults()
        return
    resolved = _configuration(
        config, settings or [], model=model, engine=engine, url=url, prompts=prompts,
        temperature=temperature, trials=trials,
    )
    directory = out or Path("runs") / time.strftime("audit-%Y%m%d-%H%M%S")
    session = Session(
        config=resolved,
        directory=directory,
        sync=sync,
        resets_cache=reset_cache,
        wrap=_fault(inject),
    )
    _write_environment(directory)
    with Bar() as progress:
        audited = session.run(progress, reproduce=command_line(sys.argv[1:]))
    write_report(directory)
    print_verdict(audited.record, console.stdout(), directory)
    raise typer.Exit(audited.record.verdict.exit_code)


def _configuration(path: Path | None, settings: list[str], **options: Any) -> "RunConfig":
    """The file, then `--set`, then the options that have a name of their own."""
    from zerodrift.config.load import load

    keys = {
        "model": "model.path",
        "engine": "engine.name",
        "url": "engine.url",
        "prompts": "validation.prompts",
        "temperature": "sampling_defaults.temperature",
        "trials": "validation.equivalence_trials",
    }
    named = [f"{keys[name]}={value}" for name, value in options.items() if value is not None]
    return load(path, [*settings, *named])


def _fault(name: str | None) -> Any:
    if name is None:
        return None
    from zerodrift.faults.registry import resolve

    return resolve(name).inject


def _list_faults() -> None:
    from zerodrift.faults.registry import FAULTS

    for name, fault in FAULTS.items():
        console.say(f"{name:45} {fault.says}")


def _write_environment(directory: Path) -> None:
    import msgspec

    from zerodrift.cli.env import collect
    from zerodrift.records.codec import write_atomically
    from zerodrift.records.directory import ENVIRONMENT

    directory.mkdir(parents=True, exist_ok=True)
    import torch

    write_atomically(directory / ENVIRONMENT, msgspec.json.encode(collect(torch)))
