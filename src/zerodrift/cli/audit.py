"""`zerodrift audit`: is this engine the same policy as the trainer? And what did earlier audits find?"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from zerodrift.cli import console
from zerodrift.cli.bar import Bar, import_shown
from zerodrift.cli.console import JsonOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerodrift.audit.session import Session
    from zerodrift.config.load import Option
    from zerodrift.config.run import RunConfig
    from zerodrift.records.verdict import VerdictRecord

RUNS = Path("runs")
KEYS = {
    "model": "model.path",
    "engine": "engine.name",
    "url": "engine.url",
    "prompts": "validation.prompts",
    "baseline": "validation.baseline",
    "trainer": "validation.trainer",
    "task": "validation.task",
    "device": "validation.reference_device",
    "temperature": "sampling_defaults.temperature",
    "num_prompts": "validation.num_prompts",
    "trials": "validation.equivalence_trials",
}
"""Where the value of an option stands in a configuration."""


class AuditOrVerb(TyperGroup):
    """A command that has verbs beside it: the first word decides.

    Where it names a verb, all that follows is the verb's; everything else is parsed as the command's own, options
    and MODEL in any order. A model directory called `ls` is audited as `./ls`.
    """

    allow_interspersed_args = True
    allow_extra_args = False  # a word after MODEL is a mistake, never a verb that would run after the audit

    # The types are those of the Click inside Typer, which has no public name.
    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command, or of the verb in its place."""
        if args and (verb := self.commands.get(args[0])) is not None:
            return verb.make_context(f"{info_name} {args[0]}", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


BaselineOption = Annotated[
    Path | None, typer.Option(help="Recorded ground truth; see `zerodrift baseline record`.")
]
TrainerOption = Annotated[
    str | None,
    typer.Option(
        help="Your trainer's forward: module:scorer, or transformers with dtype=… and more (docs/trainer.md)."
    ),
]
TaskOption = Annotated[
    str | None, typer.Option(help="Prompts with rewards, to compare those too: sums, or module:task.")
]

DeviceOption = Annotated[
    str | None, typer.Option(help="Where the reference computes: cpu or cuda. Default: cpu.")
]
ResetOption = Annotated[
    bool, typer.Option("--reset-cache/--no-reset-cache", help="Does your update reset the prefix cache?")
]
InjectOption = Annotated[
    str | None, typer.Option(help="Plant a fault, CAUSE[:VARIANT], to see it found. `list` lists them.")
]
CaseOption = Annotated[
    Path | None, typer.Option(help="Send only this case.json of an earlier audit, and show its tokens.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="One setting, as section.key=value. Repeatable.")
]
TrialsOption = Annotated[
    int | None, typer.Option(help="Sampled sequences to judge by, of all prompts together.")
]
BudgetOption = Annotated[
    str | None, typer.Option(help="Time to spend, as 2m, 10m or 1h: a pilot fixes prompts and trials.")
]

app = typer.Typer(cls=AuditOrVerb, invoke_without_command=True, subcommand_metavar="| COMMAND [ARGS]...")


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
@app.callback()
def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint directory or testbed:NAME. Default: testbed:qwen3."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="exact, reference, vllm, llama-cpp or sglang. Default: exact."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Address of a running server.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; see `zerodrift init`.")] = None,
    settings: SetOption = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `prompt`, `prompt_token_ids` or `messages`.")
    ] = None,
    baseline: BaselineOption = None,
    trainer: TrainerOption = None,
    task: TaskOption = None,
    device: DeviceOption = None,
    temperature: Annotated[float | None, typer.Option(help="What the trainer samples at.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="How many prompts are asked.")] = None,
    trials: TrialsOption = None,
    budget: BudgetOption = None,
    sync: Annotated[bool, typer.Option("--sync", help="Also push a weight update and follow it.")] = False,
    reset_cache: ResetOption = True,
    inject: InjectOption = None,
    case: CaseOption = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; an unfinished one is resumed.")] = None,
    junitxml: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write a JUnit file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Is this engine the same policy as the trainer, and if not, why?

    Samples from the engine, scores the same tokens with vanilla transformers,
    measures the rounding floor, and names the cause of what is left, with the
    fix to type. Exit code: 0 pass, 1 fail, 2 usage, 3 could not judge.

    $ zerodrift audit
    $ zerodrift audit ./model --engine vllm --url http://127.0.0.1:8000
    $ zerodrift audit ./model --trainer transformers:autocast=bfloat16
    $ zerodrift audit ./model --task my_module:task
    $ zerodrift audit --inject semantic/raw-logprobs --temperature 0.7

    Earlier audits, and what changed between two of them:

    $ zerodrift audit ls
    $ zerodrift audit diff RUN RUN
    """
    if inject == "list":
        return _list_faults()
    from zerodrift.config.load import load

    named: dict[str, Any] = {"model": model, "engine": engine, "url": url, "prompts": prompts}
    named |= {"baseline": baseline, "trainer": trainer, "task": task, "device": device}
    counts = {"num_prompts": num_prompts, "trials": trials}
    resolved = load(config, settings or [], options_of(**named, temperature=temperature, **counts))
    _check_options(sync, reset_cache, junitxml)
    seconds = _seconds(budget, counts, settings or [], case)
    if inject is not None and engine is None:
        resolved = _with_host(resolved, inject)
    session = _session(resolved, out, inject, sync=sync, resets_cache=reset_cache, budget=seconds)
    if case is not None:
        raise typer.Exit(_replay(session, case))
    record = _run(session, named=out is not None)
    _publish(record, session.directory, junitxml, as_json=as_json)
    raise typer.Exit(record.verdict.exit_code)


@app.command("ls")
def list_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that holds the runs.")] = RUNS,
    as_json: JsonOption = False,
) -> None:
    """List audits, newest first, finished or not.

    $ zerodrift audit ls
    $ zerodrift audit ls nightly --json
    """
    from zerodrift.view.runs import list_runs
    from zerodrift.view.tables import print_runs

    runs = list_runs(directory)
    if as_json:
        console.say_json(runs)
    elif runs:
        told = console.stdout()
        # Who pipes it on wants a line for each.
        print_runs(runs, told, fit=told.is_terminal)
    else:
        console.say(f"{directory} holds no runs")


@app.command("diff")
def diff_command(
    before: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run, or its name in `ls`.")],
    after: Annotated[
        str, typer.Argument(metavar="RUN", help="The run to compare with it, by custom the newer.")
    ],
    as_json: JsonOption = False,
) -> None:
    """What changed between two audits, and what explains it?

    Fingerprints first, then numbers, then one sentence. Exit code: 0 where the
    second verdict is as good as the first or better, 1 where it is worse.

    $ zerodrift audit diff audit-20261115-031000 audit-20261116-031000
    $ zerodrift audit diff runs/before runs/after --json
    """
    import msgspec

    from zerodrift.view.comparison import compare_runs
    from zerodrift.view.runs import find_run
    from zerodrift.view.tables import explain, print_comparison

    comparison = compare_runs(find_run(before, RUNS), find_run(after, RUNS))
    if as_json:
        told = {
            "message": explain(comparison),
            "worse": comparison.worse,
            **msgspec.structs.asdict(comparison),
        }
        console.say_json(told)
    else:
        print_comparison(comparison, console.stdout())
    raise typer.Exit(int(comparison.worse))


def _session(resolved: "RunConfig", out: Path | None, inject: str | None, **options: Any) -> "Session":
    # Seconds of imports, and not before what can be refused without them.
    import_shown("zerodrift.audit.session")
    from zerodrift.audit.session import Session
    from zerodrift.cli.env import beside_a_run

    if inject is not None:
        options |= _fault(inject, resolved, options["sync"], options["resets_cache"])
    return Session(
        config=resolved,
        directory=out or RUNS / time.strftime("audit-%Y%m%d-%H%M%S"),
        planted=inject or "",
        environment=beside_a_run(),
        **options,
    )


def _run(session: "Session", *, named: bool) -> "VerdictRecord":
    from zerodrift.audit.session import command_line

    progress = Bar()
    # The bar ends first: a note beside it would be drawn over.
    with console.resumable(progress, session.directory, named=named), progress:
        return session.run(progress, reproduce=command_line(sys.argv[1:])).record


def _replay(session: "Session", path: Path) -> int:
    """0 where every token is right, 1 where one is not, 3 where nothing came that could be judged."""
    from zerodrift.records.case import read_case
    from zerodrift.records.verdict import Outcome
    from zerodrift.view.text import print_replayed

    case = read_case(path)
    with Bar() as progress:
        replayed = session.replay(case, progress)
    print_replayed(case, replayed.tokens, replayed.problem, console.stdout())
    if replayed.first_bad is None and replayed.measurement is None:
        return Outcome.INCONCLUSIVE.exit_code
    return int(replayed.first_bad is not None)


def _publish(record: "VerdictRecord", directory: Path, junitxml: Path | None, *, as_json: bool) -> None:
    """The verdict wherever somebody looks: report, terminal, JUnit file."""
    from zerodrift.records.verdict import Outcome
    from zerodrift.view.junit import write_junit
    from zerodrift.view.report import write_report
    from zerodrift.view.text import print_verdict

    # First what a pipeline reads: a disk that is full is no reason to lose the verdict.
    if junitxml is not None:
        write_junit(junitxml, record)
    try:
        write_report(directory)
    except OSError as error:
        console.note(f"the report could not be written ({error.strerror}); the verdict stands")
    if as_json:
        console.say_json(record)
    else:
        print_verdict(record, console.stdout(), directory)
    if any(probe.cut_off for probe in record.probes) and record.verdict is Outcome.INCONCLUSIVE:
        console.note(f"to go on where the engine failed, repeat the command with --out {directory}")


def options_of(**named: Any) -> "list[Option]":
    """Settings that have an option of their own, where it was given."""
    from zerodrift.config.load import Option

    return [
        Option("MODEL" if name == "model" else f"--{name.replace('_', '-')}", KEYS[name], value)
        for name, value in named.items()
        if value is not None
    ]


def _with_host(resolved: "RunConfig", inject: str) -> "RunConfig":
    """The reference in place of the default engine where the fault can be planted nowhere else."""
    import msgspec

    from zerodrift.config.engine import EngineConfig
    from zerodrift.config.run import EXACT
    from zerodrift.faults.registry import resolve

    if resolved.engine != EXACT or not resolve(inject).needs_reference(resolved.sampling_defaults.params()):
        return resolved
    console.note(f"{inject} acts inside the reference engine, which is audited in place of the exact one")
    return msgspec.structs.replace(resolved, engine=EngineConfig(name="reference"))


def _fault(name: str, resolved: "RunConfig", sync: bool, resets_cache: bool) -> dict[str, Any]:
    """Where the session is to plant it: in the engine, or in the trainer."""
    from zerodrift.core.cause import Layer
    from zerodrift.core.errors import ConfigError
    from zerodrift.faults.registry import resolve

    fault = resolve(name)
    params, engine = resolved.sampling_defaults.params(), resolved.engine.name
    fault.check_visible(params, engine=engine, sync=sync, resets_cache=resets_cache)
    if fault.kind is not Layer.TRAINER:
        return {"wrap": fault.inject}
    if resolved.validation.trainer is not None:
        raise ConfigError(f"{name} is planted in a trainer of its own; leave out --trainer")
    return {"scorer": fault.scorer}


def _list_faults() -> None:
    from zerodrift.faults.registry import FAULTS

    for name, fault in FAULTS.items():
        console.say(f"{name:45} {fault.message}")


def _seconds(
    budget: str | None, counts: "Mapping[str, int | None]", settings: list[str], case: Path | None
) -> float | None:
    from zerodrift.config.budget import seconds_of
    from zerodrift.core.errors import ConfigError

    if budget is None:
        return None
    fixed = ("validation.num_prompts=", "validation.equivalence_trials=")
    counted = any(each is not None for each in counts.values())
    if counted or case is not None or any(each.startswith(fixed) for each in settings):
        raise ConfigError(
            "--budget fixes the numbers of prompts and trials, and so does what stands beside it; "
            "leave out --num-prompts, --trials, --case and what sets them, or --budget"
        )
    return seconds_of(budget)


def _check_options(sync: bool, reset_cache: bool, junitxml: Path | None) -> None:
    """What can be refused before anything is loaded."""
    from zerodrift.core.errors import ConfigError

    if not sync and not reset_cache:
        raise ConfigError(
            "--no-reset-cache says how weights are updated, and without --sync none are; add --sync"
        )
    if junitxml is not None:
        fresh = not junitxml.exists()
        console.check_writable("--junitxml", junitxml)
        if fresh:  # an empty file is no JUnit
            junitxml.unlink()
