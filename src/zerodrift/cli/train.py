"""`zerodrift train`: online RL whose rollouts are the trainer's own policy, bit for bit; to go on with, and to replay."""

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerodrift.cli import console
from zerodrift.cli.bar import Bar
from zerodrift.cli.train_replay import replay_command
from zerodrift.cli.train_step import graceful, tell
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
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Two configurations: do they train alike?"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each side or condition; default 3.")
    ] = None,
    story: Annotated[
        bool, typer.Option("--story", help="The faults of the V0 → V1 story, each in a training.")
    ] = False,
    condition: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of --story, only this one; repeatable.")
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

    Do two engines, releases or flags train alike? The same short training
    under both, three seeds each: reward, clip rate, KL, entropy, ESS, lag and
    mismatch with bands over seeds, and a verdict. What is given beside it
    holds for both, but --inject is planted in the second. Repeat the command
    to go on where it stopped, or with more --seeds. Exit code: 0 no
    difference beyond seeds, 1 different, 2 usage, 3 could not judge.

    $ zerodrift train --compare old.yaml new.yaml --steps 20 --out runs/upgrade
    $ zerodrift train --compare my.yaml my.yaml --inject path/head-precision

    The V0 → V1 story as trainings (docs/story.md), in pieces that are done
    once each; repeat the command to go on:

    $ zerodrift train --story --condition sound --condition raw
    """
    planted = {"inject": inject, "inject_from": inject_from}
    if seeds is not None and compare is None and not story:
        raise ConfigError(
            "--seeds counts the runs of each side of --compare A B, or of --story; one run has --set train.seed=N"
        )
    if condition and not story:
        raise ConfigError("--condition names a part of the story; give --story")
    if story:
        _refuse_beside(
            "--story", "conditions of its own", config=config, steps=steps, objective=objective, resume=resume,
            replay=replay, until=until, without=without, compare=compare, **planted,
        )  # fmt: skip
        _story(seeds or 3, condition or [], settings or [], out, as_json=as_json)
        return
    if compare is not None:
        _refuse_beside(
            "--compare", "two configurations and begins anew", config=config, resume=resume, replay=replay,
            until=until, without=without,
        )  # fmt: skip
        _compare(compare, seeds or 3, out, (steps, objective, settings or []), planted, as_json=as_json)
        return
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
    directory = out or _new_directory("train")
    resolved = None if resume else _resolved(config, steps, objective, planted, settings or [])
    _train(resolved, directory, steps, place, named=out is not None, as_json=as_json)


def _compare(
    files: tuple[Path, Path],
    seeds: int,
    out: Path | None,
    asked: tuple[int | None, ObjectiveName | None, list[str]],
    planted: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Both sides are the same but for what stands in their files, and what is planted in the second."""
    from zerodrift.cli.train_compare import compare_command

    nothing = dict.fromkeys(planted)
    steps, objective, settings = asked
    configs = [
        _resolved(path, steps, objective, faults, settings)
        for path, faults in zip(files, (nothing, planted), strict=True)
    ]
    directory = out or _new_directory("compare")
    compare_command(files, configs, seeds, directory, named=out is not None, as_json=as_json)


def _story(seeds: int, condition: list[str], settings: list[str], out: Path | None, *, as_json: bool) -> None:
    """Without --out in one place, so that the same command goes on."""
    from zerodrift.cli.train_story import story_command

    story_command(seeds, condition, settings, out or RUNS / "story", as_json=as_json)


def _new_directory(word: str) -> Path:
    return RUNS / time.strftime(f"{word}-%Y%m%d-%H%M%S")


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


def _refuse_beside(option: str, takes: str = "the run as it was configured", /, **given: Any) -> None:
    """A recorded run has its configuration, and a comparison two."""
    for name, value in given.items():
        if value:
            flag = {"config": "CONFIG", "settings": "--set"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{option} takes {takes}; leave out {flag}")


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
        graceful() as stopped,
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
