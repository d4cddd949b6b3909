"""From a configuration and a directory to a training that can run: begun, gone on with, or replayed."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from zerodrift import models
from zerodrift.config.model import ModelConfig
from zerodrift.config.run import RunConfig
from zerodrift.config.training import RolloutsFrom
from zerodrift.core.errors import ArchiveLocked, ConfigError, ExactError, RecordError
from zerodrift.core.version import WeightVersion
from zerodrift.engine.weights import own_model
from zerodrift.exact.fingerprint import numeric_fingerprint
from zerodrift.exact.preparation import prepare
from zerodrift.models.spec import builtin_name
from zerodrift.models.warmup import warm_up
from zerodrift.monitor.decision import State
from zerodrift.monitor.monitor import Monitor
from zerodrift.tasks.checked import open_task
from zerodrift.tasks.sums import SmallSums
from zerodrift.train.buffer import GroupBuffer
from zerodrift.train.checkpoint import read_checkpoint, steps_of, write_checkpoint
from zerodrift.train.learner import Learner
from zerodrift.train.loop import Training
from zerodrift.train.planted import check_resumable
from zerodrift.train.prompts import PromptStream
from zerodrift.train.records import RunFiles, RunHeader, StepRecord, version_label
from zerodrift.train.rollouts import check_engine, measured_here, open_source, reach
from zerodrift.train.served import ReachedServer
from zerodrift.weights.digest import model_digest

logger = logging.getLogger("zerodrift.train")

WEIGHTS = "weights"
"""Of the engine's last versions; made anew by every process."""


class ServerPlace(NamedTuple):
    """Where a server is reached: all that may change of a run's configuration, beside the number of steps."""

    url: str | None = None
    admin_token_file: str | None = None

    def put_into(self, config: RunConfig) -> RunConfig:
        """The configuration of the run, at this place."""
        engine, train = config.engine, config.train
        if self.url is not None:
            engine = msgspec.structs.replace(engine, url=self.url)
        if self.admin_token_file is not None:
            train = msgspec.structs.replace(train, admin_token_file=self.admin_token_file)
        return msgspec.structs.replace(config, engine=engine, train=train)


def begin(config: RunConfig, directory: Path) -> Training:
    """A new training. Its first checkpoint is on the disk before it counts as begun."""
    check(config)
    files = RunFiles(directory)
    _require_none(files)
    directory.mkdir(parents=True, exist_ok=True)
    model, tokenizer = _policy(config.model), models.tokenizer(_path(config.model))
    prompts = _prompts(config, model)
    if builtin_name(_path(config.model)) is not None and config.train.warmup_steps:
        lessons = prompts.task.lessons() if isinstance(prompts.task, SmallSums) else None
        warm_up(model, tokenizer, config.train.warmup_steps, lessons)
    learner = _learner(model, config)
    with ExitStack() as opened:
        server = _reached(config, model, opened)
        monitor = _monitor(config, directory, server)
        opened.callback(monitor.close)
        # Asked again by the one who holds the directory: another may have begun, and ended, while this one warmed up.
        _require_none(files)
        training = _training(
            config, files, learner, tokenizer, prompts, monitor, directory / WEIGHTS, server=server
        )
        opened.callback(training.close)
        # Behind the first update: a server that refuses this model leaves nothing that was begun.
        write_checkpoint(directory, learner, 0, 0)
        files.begin(_header(config, model, WeightVersion(version_label(0), model_digest(model))))
        opened.pop_all()
    return training


def resume(directory: Path, *, steps: int | None = None, place: ServerPlace | None = None) -> Training:
    """Go on from the last checkpoint: steps that were recorded after it are done again, and must give the same weights.

    `place`: where the server is now, which may have another address and another token than when the run began.
    """
    files = RunFiles(directory)
    header = files.header()
    config = header.config if place is None else place.put_into(header.config)
    check(config)
    if steps is not None:
        config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, steps=steps))
    model, tokenizer = _policy(config.model), models.tokenizer(_path(config.model))
    header.require_same(_header(config, model, header.first))
    with ExitStack() as opened:
        server = _reached(config, model, opened)
        monitor = _monitor(config, directory, server)
        opened.callback(monitor.close)
        # From here on the directory is ours: a line that another process is writing looks like a torn one.
        files.mend()
        learner = _learner(model, config, directory)
        kept = read_checkpoint(directory, learner, _latest(directory))
        check_resumable(config, kept.step)
        training = _training(
            config, files, learner, tokenizer, _prompts(config, model), monitor, directory / WEIGHTS,
            step=kept.step, cursor=kept.cursor, steps=files.steps(), server=server,
        )  # fmt: skip
        opened.callback(training.close)
        _take_back(monitor, files, len(training.steps) - 1)
        if monitor.state is State.HALT:
            monitor.half_open()
        opened.pop_all()
    return training


def _require_none(files: RunFiles) -> None:
    if files.exists:
        raise ConfigError(
            f"{files.directory} has a training already; go on with --resume, or choose another --out"
        )


def _reached(config: RunConfig, model: Any, opened: ExitStack) -> ReachedServer | None:
    """Closed again where the rest of the beginning fails."""
    if (server := reach(config, numeric_fingerprint(model))) is not None:
        opened.callback(server.close)
    return server


def replay(directory: Path, scratch: Path) -> Training:
    """A recorded run once more, from its first checkpoint: every token drawn again, every step's digest compared."""
    files = RunFiles(directory)
    header = files.header()
    if header.config.train.rollouts is RolloutsFrom.VLLM:
        raise ExactError(
            f"{directory} took its rollouts from a vLLM, whose numbers are its own: no seed draws its tokens again here, so there is "
            "nothing to replay bit for bit. train.jsonl has the mismatch of every step; runs of exact engines (train.rollouts=exact "
            "or serve) are replayed"
        )
    assert not measured_here(header.config), (
        "a run whose numbers are measured is done again as a whole (again.py)"
    )
    model = _policy(header.config.model)
    header.require_same(_header(header.config, model, header.first))
    learner = _learner(model, header.config, directory)
    read_checkpoint(directory, learner, 0)
    return _training(
        header.config, files, learner, models.tokenizer(_path(header.config.model)),
        _prompts(header.config, model), None, scratch / WEIGHTS, steps=files.steps(),
    )  # fmt: skip


def _training(  # noqa: PLR0913 - the parts of a training, each by name
    config: RunConfig,
    files: RunFiles,
    learner: Learner,
    tokenizer: Any,
    prompts: PromptStream,
    monitor: Monitor | None,
    weights: Path,
    *,
    step: int = 0,
    cursor: int = 0,
    steps: list[StepRecord] | None = None,
    server: ReachedServer | None = None,
) -> Training:
    """A replay has no server: what an exact one made is drawn again in this process."""
    source = open_source(config, server, learner.model, tokenizer, weights, first=step)
    return Training(
        config=config, files=files, learner=learner, source=source, prompts=prompts, monitor=monitor,
        buffer=GroupBuffer(config.train, cursor=cursor), step=step, groups=files.groups(), steps=steps or (),
    )  # fmt: skip


def check(config: RunConfig) -> None:
    """What could not be begun is refused before anything is loaded."""
    check_engine(config)
    _check_truncation(config)


def _check_truncation(config: RunConfig) -> None:
    """What one version's top-k, top-p or min-p keeps another's may cut off, and the log of its probability is then -inf.

    Alone, more epochs are sound: such a token has a ratio of 0. Entropy at lag 0 and one epoch is, too: all tokens are the
    current weights' own.
    """
    sampling, train = config.sampling_defaults.params(), config.train
    if not sampling.truncates:
        return
    for undefined, meets, change in (
        (train.kl_coef > 0, f"train.kl_coef={train.kl_coef}", "train.kl_coef=0"),
        (train.max_lag > 0, f"train.max_lag={train.max_lag}", "train.max_lag=0"),
        (
            train.entropy_coef > 0 and train.epochs > 1,
            f"train.entropy_coef={train.entropy_coef} with train.epochs={train.epochs}",
            "train.epochs=1 or train.entropy_coef=0",
        ),
    ):
        if undefined:
            raise ConfigError(
                f"sampling_defaults has top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p}, and {meets}: "
                "a token that some weights drew may have probability 0 by others, and no log-ratio; set "
                f"{change}, or sample from all tokens (top_k=0, top_p=1, min_p=0)"
            )


def _path(model: ModelConfig) -> str:
    if model.path is None:
        raise ConfigError("model.path is not set; name a checkpoint directory, or testbed:llama")
    return model.path


def _policy(model: ModelConfig) -> Any:
    """Trainable, and no dropout: what learns computes what the engine computes."""
    loaded = models.load(_path(model), dtype="float32" if model.dtype == "auto" else model.dtype)
    return loaded.eval().requires_grad_(requires_grad=True)


def _prompts(config: RunConfig, model: Any) -> PromptStream:
    return PromptStream(open_task(config.train.task, _path(config.model)), config, model.config.vocab_size)


def _learner(model: Any, config: RunConfig, directory: Path | None = None) -> Learner:
    """With a reference where a KL to it is asked for: the weights that the run began with."""
    prepare(model)
    reference = None
    if config.train.kl_coef:
        if directory is not None:
            read_checkpoint(directory, Learner(model, config.train), 0)
        reference = own_model(model, None)
    return Learner(model, config.train, reference)


def _header(config: RunConfig, model: Any, first: WeightVersion) -> RunHeader:
    return RunHeader(
        config=config,
        first=first,
        numeric=dict(numeric_fingerprint(prepare(model))),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
    )


def _monitor(config: RunConfig, directory: Path, server: ReachedServer | None) -> Monitor:
    """Its gates are those of the coarser side."""
    coarse = config.model.dtype == "bfloat16" or (server is not None and server.coarse)
    precision = "bf16" if coarse else "fp32"
    try:
        return Monitor(config.monitoring, precision=precision, directory=directory)
    except ArchiveLocked as error:
        raise ArchiveLocked(
            f"another process trains in {directory}; wait for its end, or choose another --out"
        ) from error


def _take_back(monitor: Monitor, files: RunFiles, last: int) -> None:
    """The monitor remembers what was recorded, up to step `last`, and no batch that it will be shown once more."""
    wanted = None if last < 0 else last
    for state in (monitor.remembered, files.monitor_before()):
        if state.step == wanted:
            monitor.restore(state)
            return
    logger.warning(
        "%s: the monitor has judged up to step %s, and step %s is the last that was recorded; its state of then is not there, "
        "so that batches in between count twice",
        files.directory, monitor.remembered.step, wanted,
    )  # fmt: skip
    monitor.rewind(last, max(last, 0))


def _latest(directory: Path) -> int:
    if not (found := steps_of(directory)):
        raise RecordError(f"{directory} has no checkpoint; start it anew in another directory")
    return found[-1]
