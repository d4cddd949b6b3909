"""`zerodrift train`: online RL whose rollouts are the trainer's own policy, bit for bit; to go on with, and to replay."""

import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerodrift.cli import console
from zerodrift.cli.bar import Bar
from zerodrift.cli.train_replay import replay_command
from zerodrift.cli.train_step import tell
from zerodrift.config.training import CorrectionName, ObjectiveName, RolloutsFrom
from zerodrift.core.errors import ConfigError

if TYPE_CHECKING:
    from zerodrift.config.run import RunConfig
    from zerodrift.train.loop import Training
    from zerodrift.train.summary import TrainSummary

RUNS = Path("runs")
BUNDLED = (
    "model.path=testbed:llama", "sampling_defaults.max_tokens=3", "train.task=small-sums", "train.groups=25",
    "train.samples=32", "train.steps=50", "train.warmup_steps=40", "train.learning_rate=0.0002", "train.entropy_coef=0.05",
    "train.zero_advantage=keep",
)  # fmt: skip
"""What is trained where nothing is named: a built-in model on 25 sums. With 16 samples, or half of the learning rate, more sums
lose their right answer to that of a neighbour before it is drawn often enough."""


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML, as `zerodrift init` writes it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the run; default runs/train-TIME.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps in all.")] = None,
    objective: Annotated[ObjectiveName | None, typer.Option(help="What is made of rewards.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Do a recorded run again, and compare.")
    ] = None,
    until: Annotated[int | None, typer.Option(min=1, help="Steps to replay; default all.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="CAUSE", help="Replay without this planted fault; repeatable.")
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(metavar="CAUSE[:VARIANT]", help="Plant a fault in the engine; repeatable."),
    ] = None,
    inject_from: Annotated[
        int | None, typer.Option(min=0, help="Step from which on it is there; default 0.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As in the file; repeatable.")
    ] = None,
    as_json: console.JsonOption = False,
) -> None:
    """Train a policy online, and prove that engine and trainer agree.

    Rollouts come from the exact engine in this process, or from a server
    (train.rollouts: serve or vllm), while the learner learns. Weights change
    in flight; each token keeps the version that made it, and its logprob is
    computed again by the trainer: a bit that differs stops the training, and
    of a vLLM the difference is measured. Without arguments a built-in model
    learns to add.

    $ zerodrift train
    $ zerodrift train my.yaml --out runs/mine
    $ zerodrift train --out runs/mine --resume
    $ zerodrift train --replay runs/mine --until 30
    $ zerodrift view runs/mine

    What a broken engine does to a training, and what the same training is
    without it:

    $ zerodrift train --inject path/head-precision --inject-from 10 --out runs/it
    $ zerodrift train --replay runs/it --without path/head-precision
    """
    if replay is not None:
        _refuse_beside(
            "--replay", config=config, steps=steps, objective=objective, inject=inject,
            inject_from=inject_from, settings=settings, **({} if without else {"out": out}),
        )  # fmt: skip
        if resume:
            raise ConfigError(
                "--replay does a run again, and --resume goes on with one; leave one of them out"
            )
        replay_command(replay, until, without or [], out, as_json=as_json)
        return
    if until is not None or without:
        flag = "--without takes a planted fault out of" if without else "--until says how far to do"
        raise ConfigError(f"{flag} a run that is done again; give --replay RUN")
    if resume:
        _refuse_beside("--resume", config=config, objective=objective, inject=inject, inject_from=inject_from)
        if out is None:
            raise ConfigError("--resume goes on with a run; name it with --out")
    place = _place(settings or []) if resume else {}
    directory = out or RUNS / time.strftime("train-%Y%m%d-%H%M%S")
    planted = {"inject": inject, "inject_from": inject_from}
    resolved = None if resume else _resolved(config, steps, objective, planted, settings or [])
    _train(resolved, directory, steps, place, named=out is not None, as_json=as_json)


_MOVED = ("engine.url", "train.admin_token_file")
"""What may be another when a run goes on: the server was started anew."""


def _place(settings: list[str]) -> dict[str, str]:
    """Those of `--set` that say where the server is now; a recorded run has the rest of its configuration."""
    found = {}
    for each in settings:
        key, separator, value = each.partition("=")
        if key not in _MOVED:
            _refuse_beside("--resume", settings=each)
        if not separator or not value:
            raise ConfigError(f"--set {each} gives no value; write {key}=VALUE")
        found[key.rpartition(".")[2]] = value
    return found


def _refuse_beside(option: str, **given: Any) -> None:
    """A recorded run has its configuration."""
    for name, value in given.items():
        if value:
            flag = {"config": "CONFIG", "settings": "--set"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{option} takes the run as it was configured; leave out {flag}")


def _resolved(
    path: Path | None,
    steps: int | None,
    objective: ObjectiveName | None,
    planted: dict[str, Any],
    settings: list[str],
) -> "RunConfig":
    from zerodrift.config.load import Option, load

    named = {"--steps": ("train.steps", steps), "--objective": ("train.objective", objective)}
    named |= {f"--{name.replace('_', '-')}": (f"train.{name}", value) for name, value in planted.items()}
    options = [Option(flag, key, value) for flag, (key, value) in named.items() if value is not None]
    return load(path, [*(BUNDLED if path is None else ()), *settings], options)


def _train(
    config: "RunConfig | None",
    directory: Path,
    steps: int | None,
    place: dict[str, str],
    *,
    named: bool,
    as_json: bool,
) -> None:
    from zerodrift.train.setup import ServerPlace, begin, resume
    from zerodrift.train.summary import summary_of

    with (
        Bar() as bar,
        console.resumable(bar, directory, named=named, command=lambda: _resumed_by(directory, steps, place)),
        _graceful() as stopped,
    ):
        bar.stage("warm up" if config is not None else "read the run")
        training = (
            resume(directory, steps=steps, place=ServerPlace(**place))
            if config is None
            else begin(config, directory)
        )
        _say_what_is_on(training)
        try:
            total = training.config.train.steps
            training.run(total, lambda record: tell(bar, record, total), lambda: bool(stopped))
        finally:
            training.close()
        if stopped and training.step < total:
            sys.exit(128 + stopped[0])
    found = summary_of(training.files.steps())
    if as_json:
        console.say_json(found)
        return
    exact, measured = training.source.exact, training.config.train.rollouts is RolloutsFrom.VLLM
    again = (
        "a run of a vLLM is not replayed"
        if measured
        else f"{shlex.join(['zerodrift', 'train', '--replay', str(directory)])} does it again"
    )
    console.say(
        f"reward {found.first_reward:.3f} to {found.last_reward:.3f} in {found.steps} steps, {found.tokens:,} tokens, "
        f"{found.seconds:.0f} s\n"
        f"{_mismatch(found, exact=exact)} ({found.tokens:,} were learnt from); oldest {found.lag} versions, "
        f"{found.dropped} groups dropped, {found.kept_back} batches kept back\n"
        f"weights {found.digest[:16]} in {directory}; {again}"
    )


def _resumed_by(directory: Path, steps: int | None, place: dict[str, str]) -> str:
    """With what a run does not record, where it was typed; nothing yet, where the warm-up was not over."""
    from zerodrift.train.records import RUN

    if not (directory / RUN).is_file():
        return ""
    words = ["zerodrift", "train", "--out", str(directory), "--resume"]
    words += [] if steps is None else ["--steps", str(steps)]
    moved = {key.rpartition(".")[2]: key for key in _MOVED}
    return shlex.join(
        [*words, *(word for name, value in place.items() for word in ("--set", f"{moved[name]}={value}"))]
    )


def _mismatch(found: "TrainSummary", *, exact: bool) -> str:
    """Of an exact engine a promise that was kept, or there would be no summary; of another what was measured."""
    if exact:
        return f"mismatch exactly 0 on {found.rescored:,} of {found.rescored:,} re-scored tokens"
    if found.mismatch is None:
        return "mismatch unknown: no token was scored again"
    return (
        f"mismatch {found.mismatch:.2g} nats on average, {found.mismatch_largest:.2g} at most, on {found.rescored:,} re-scored "
        "tokens"
    )


def _say_what_is_on(training: "Training") -> None:
    hides = (
        "Here it can only correct for lag, since a differing bit stops the training"
        if training.source.exact
        else "The mismatch that is reported is the one before it"
    )
    if training.config.train.correction is not CorrectionName.NONE:
        console.note(
            f"train.correction={training.config.train.correction} weighs tokens by how far engine and trainer are apart: that "
            f"hides an engine that is wrong. {hides}"
        )


@contextmanager
def _graceful() -> Iterator[list[int]]:
    """The first signal ends the training after the step that is under way; the second one at once."""
    stopped: list[int] = []

    def stop(number: int, _frame: object) -> None:
        if stopped:
            sys.exit(128 + number)
        stopped.append(number)
        console.note("the step that is under way is finished and kept; once more ends it now")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
