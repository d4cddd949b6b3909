"""`zerodrift blame`: from recorded rollouts and a checkpoint, which side is wrong, why, and since which step?"""

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from zerodrift.cli import console
from zerodrift.cli.bar import Bar, import_shown
from zerodrift.cli.console import JsonOption
from zerodrift.config.model import Device
from zerodrift.config.precision import Precision
from zerodrift.core.errors import ConfigError
from zerodrift.records.archived import BatchState
from zerodrift.records.dump_formats import DumpFormat

if TYPE_CHECKING:
    from zerodrift.audit.blame import Blamed

RUNS = Path("runs")
QUICK = 2000
"""Tokens that `--quick` scores, prompts included: 24 rollouts of 85."""
_RANGE = re.compile(r"(\d*):(\d*)|(\d+)")


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    dump: Annotated[
        Path,
        typer.Argument(
            metavar="DUMP",
            help="JSON lines (- reads a pipe, gzip is unpacked), a run directory, an archive, or a directory of prime-rl "
            "or NeMo-RL.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint that should have made the rollouts, or testbed:NAME; 'ckpt/step_{step}' names one for each step."
        ),
    ],
    previous: Annotated[
        str | None, typer.Option(help="Checkpoint from before the update, to tell stale weights.")
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(help="Lowest precision of engine and trainer. Default: told from the numbers."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine that made them (vllm): fixes are given in its words.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the checkpoint computes.")] = "cpu",
    form: Annotated[DumpFormat | None, typer.Option("--format", help="Default: detected by keys.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Where the dump states none.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Where the dump states none.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Where the dump states none.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Where the dump states none.")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Judge these steps, both ends included.")
    ] = None,
    state: Annotated[
        BatchState | None, typer.Option(help="Of an archive, judge batches that were found to be so.")
    ] = None,
    version: Annotated[str | None, typer.Option(help="Judge rollouts with this weight version.")] = None,
    most_per_step: Annotated[
        int | None, typer.Option("--per-step", min=1, help="Judge at most so many rollouts of each step.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first verdict from some rollouts of each step.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad lines out and list them; default: refuse the dump.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Run directory, new or empty.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Which side is wrong in recorded rollouts, why, and since which step?

    Scores every recorded token with the checkpoint. Needs prompt token ids,
    output token ids and logprobs; with trainer logprobs as well, it tells the
    engine from the trainer, and with the checkpoint from before the update it
    tells stale weights. Exit code: 0 pass, 1 fail, 2 usage, 3 could not judge.

    $ zerodrift blame rollouts.jsonl --model ./step-100 --temperature 0.7
    $ zerodrift blame rollouts.jsonl --model ./step-100 --previous ./step-99
    $ zerodrift blame outputs/token_exports --model ./step-100 --steps 100:120
    $ zerodrift blame rollouts.jsonl --model './ckpt/step_{step}'
    $ zerodrift blame rollouts.jsonl --model ./step-100 --quick
    $ zerodrift blame runs/archive --model ./step-100 --state quarantine

    A plain line has these keys, of which the first three are needed:

    {"prompt_token_ids": [..], "token_ids": [..], "logprobs": [..], "step": 7,
    "version": "7", "temperature": 0.7, "trainer_logprobs": [..]}

    old_logprobs and the names of verl, TRL and NeMo-RL for the trainer's
    numbers mean the same as trainer_logprobs (docs/blame.md).
    """
    import_shown("zerodrift.audit.blame")
    from zerodrift import models
    from zerodrift.audit.blame import ENGINE, Blame
    from zerodrift.audit.recorded.checkpoints import per_step
    from zerodrift.audit.recorded.ids_alone import IdsAlone, tokenizer_or_ids
    from zerodrift.audit.recorded.timeline import Selection
    from zerodrift.audit.session import command_line
    from zerodrift.backends.reference import ReferenceBackend
    from zerodrift.backends.registry import check_name
    from zerodrift.core.request import SamplingParams
    from zerodrift.records.archive.index import Query
    from zerodrift.records.directory import check_new, new_directory
    from zerodrift.records.dump import DumpReader

    first, last = step_range(steps)
    said: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    given = {name: value for name, value in said.items() if value is not None}
    directory = out or RUNS / time.strftime("blame-%Y%m%d-%H%M%S")
    check_new(directory)
    if engine is not None:
        check_name(engine)
    if previous is not None:
        models.facts(previous)
    checkpoints = per_step(model)
    if checkpoints is not None and previous is not None:
        raise ConfigError(
            "--model names a checkpoint for each step, and that of the step before is tried by itself; leave --previous out"
        )
    loaded = model if checkpoints is None else str(checkpoints.first())
    facts = models.facts(loaded)
    reading = DumpReader(
        format=form,
        default=SamplingParams(**given),
        given=frozenset(given),
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        skip_bad=skip_bad,
        batches=Query(state=state, first=first, last=last),
    )
    selection = Selection(
        first=first,
        last=last,
        version=version,
        per_step=most_per_step,
        positions=QUICK if quick else None,
    )
    with Bar() as bar:
        bar.stage("read")
        read = reading.read(dump)
        if checkpoints is not None:
            checkpoints.of(selection.of(read.rollouts))
        bar.stage("load")
        tokenizer = tokenizer_or_ids(loaded)
        if isinstance(tokenizer, IdsAlone):
            bar.note(f"{loaded} has no tokenizer: {IdsAlone.lost}")
        reference = ReferenceBackend(loaded, device=device, tokenizer=tokenizer)
        blame = Blame(
            dump=read,
            reference=reference,
            precision=precision,
            previous=previous,
            checkpoints=checkpoints,
            selection=selection,
            engine=engine or ENGINE,
            # Without --out: a directory with a verdict is never written to again.
            reproduce=command_line(sys.argv[1:]),
            progress=bar,
        )
        with new_directory(directory):
            blamed = blame.run()
            blamed.write(directory, reference.tokenizer.decode)
    _publish(blamed, directory, as_json=as_json)
    raise typer.Exit(blamed.record.verdict.exit_code)


def step_range(steps: str | None) -> tuple[int | None, int | None]:
    """`10:20`, `10:`, `:20` or `10`."""
    if steps is None:
        return None, None
    match = _RANGE.fullmatch(steps)
    if match is None or steps == ":":
        raise ConfigError(f"--steps is {steps!r}; write FIRST:LAST, as 100:120, or one step")
    first, last, only = match.groups()
    begin, end = only or first, only or last
    return int(begin) if begin else None, int(end) if end else None


def _publish(blamed: "Blamed", directory: Path, *, as_json: bool) -> None:
    from zerodrift.cli.env import beside_a_run
    from zerodrift.records.codec import write_atomically
    from zerodrift.records.directory import ENVIRONMENT
    from zerodrift.view.report import write_report
    from zerodrift.view.text import print_verdict

    write_atomically(directory / ENVIRONMENT, beside_a_run())
    write_report(directory)
    if as_json:
        # As of an audit, with the answers that only blame has.
        commands = [{"when": each.label, "command": each.command} for each in blamed.to_type]
        own = {"directory": str(directory), "commands": commands}
        console.say_json({**msgspec.structs.asdict(blamed.record), **own})
        return
    about = {"side": blamed.side, "since": blamed.since.removeprefix("since "), "gates": blamed.precision}
    print_verdict(blamed.record, console.stdout(), directory, about=about, to_type=blamed.to_type)
