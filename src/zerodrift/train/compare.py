"""Two configurations, several seeds of each: every training that is not finished yet, and what all of them measured.

OUT/a-seed-0, OUT/b-seed-1, OUT/a-seed-2, …   a run each, as `zerodrift train` leaves it

The sides take turns, so that a machine that grows slow does so for both, and have seeds of their own: an exact engine
given one seed twice does one run twice, and would show nothing of how far runs lie apart. A run that is finished is never run
again, and one that was interrupted goes on; more seeds, later, are added to those that are there.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError, TrainingHalted
from zerodrift.monitor.decision import State
from zerodrift.monitor.directory import STEPS
from zerodrift.monitor.steps import Line
from zerodrift.records.codec import numbered_lines
from zerodrift.train.comparison import QUANTITIES, RunSeries
from zerodrift.train.loop import Training
from zerodrift.train.planted import ends_with_its_process, faults_of
from zerodrift.train.records import RunFiles, StepRecord
from zerodrift.train.setup import ServerPlace, begin, check, resume

SIDES = ("A", "B")
PLACE = ("engine.url", "train.admin_token_file")
"""A server that was started anew may have another."""


class OneTraining(Protocol):
    """One training that is to be done once."""

    @property
    def name(self) -> str:
        """As on a bar."""
        ...

    @property
    def seed(self) -> int:
        """Of its prompts and its noise."""
        ...

    @property
    def config(self) -> RunConfig:
        """The seed included."""
        ...

    @property
    def directory(self) -> Path:
        """Its own."""
        ...


class Planned(NamedTuple):
    """One training of a comparison."""

    side: str
    seed: int
    config: RunConfig
    directory: Path

    @property
    def name(self) -> str:
        """As on a bar."""
        return f"{self.side}, seed {self.seed}"


def planned(configs: Sequence[RunConfig], seeds: int, out: Path) -> list[Planned]:
    """Every run, in the order in which they are done; seeds count from the first configuration's own."""
    for config in configs:
        check(config)
        faults_of(config)
    first, found = configs[0].train.seed, []
    for turn in range(seeds * len(configs)):
        side, seed = turn % len(configs), first + turn
        config = with_seed(configs[side], seed)
        directory = out / f"{SIDES[side].lower()}-seed-{seed}"
        found.append(Planned(SIDES[side], seed, config, directory))
    return found


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """The same training with other prompts and other noise."""
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, seed=seed))


def finished(directory: Path, config: RunConfig) -> bool:
    """Whether this very training was done there to its end, or to where its monitor halted it."""
    files = RunFiles(directory)
    if not files.exists:
        return False
    _require_same(files, config)
    steps = files.steps()
    return len(steps) >= config.train.steps or (bool(steps) and steps[-1].state is State.HALT)


def _require_same(files: RunFiles, config: RunConfig) -> None:
    header = files.header()
    if differing := [each for each in differences(header.config, config) if each[0] not in PLACE]:
        key, theirs, ours = differing[0]
        raise ConfigError(
            f"{files.directory} has a training with {key}={theirs}, and {ours} is asked for now; choose another --out"
        )


def differences(first: RunConfig, second: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Keys whose values are not the same, with both."""
    for section in RunConfig.__struct_fields__:
        ours, theirs = getattr(first, section), getattr(second, section)
        for name in ours.__struct_fields__:
            if (one := getattr(ours, name)) != (other := getattr(theirs, name)):
                yield f"{section}.{name}", _shown(one), _shown(other)


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode().strip('"')


def do(
    run: OneTraining,
    tell: Callable[[StepRecord, int], None] = lambda record, total: None,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Begin it, or go on with it, to its end; False where it was told to stop before."""
    total = run.config.train.steps
    training = _opened(run)
    try:
        training.run(total, lambda record: tell(record, total), stopping)
    except TrainingHalted:
        return True
    finally:
        training.close()
    return training.step >= total


def _opened(run: OneTraining) -> Training:
    files = RunFiles(run.directory)
    if files.exists:
        _require_same(files, run.config)
        if not ends_with_its_process(run.config):
            place = ServerPlace(run.config.engine.url, run.config.train.admin_token_file)
            return resume(run.directory, place=place)
    # Killed in its warm-up, or not to be gone on with.
    shutil.rmtree(run.directory, ignore_errors=True)
    return begin(run.config, run.directory)


def series(run: OneTraining) -> RunSeries:
    """What a finished run has measured."""
    steps = RunFiles(run.directory).steps()
    lines = list(_decisions(run.directory / STEPS))
    found = Counter(
        f"{reason.gap}: {reason.code}" if reason.gap else str(reason.code)
        for line in lines
        for reason in {(each.gap, each.code): each for each in line.reasons if each.bad}.values()
    )
    return RunSeries(
        seed=run.seed,
        directory=str(run.directory),
        steps=len(steps),
        halted=len(steps) < run.config.train.steps,
        values={
            quantity.name: tuple(_value(step, quantity.name) for step in steps) for quantity in QUANTITIES
        },
        reasons=dict(found.most_common()),
    )


def _decisions(path: Path) -> Iterator[Line]:
    """The monitor's, one for each batch; what a kill tore off says of no batch anything."""
    decoder = msgspec.json.Decoder(Line)
    for _, line in numbered_lines(path):
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


def _value(step: StepRecord, name: str) -> float | None:
    """Of one step, by the name that a comparison has for it."""
    if name == "kept_back":
        return float(not step.trained)
    value = getattr(step, {"kl": "engine_kl", "reference_kl": "kl"}.get(name, name))
    return None if value is None else float(value)
