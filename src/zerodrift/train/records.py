"""What a training leaves on the disk, and reads again.

run.json         what is trained, from which weights, how it computes
rollouts.jsonl   a line for each group that was rewarded, in the order in which they were
train.jsonl      a line for each step: which groups, under which weights, and the digest of what came out
checkpoints/     weights and moments (`checkpoint.py`)
judged.json      the monitor's state before the last batch that it judged
steps.jsonl      the monitor's, and monitor.json, archive/: what `zerodrift view DIR` shows

A group is on the disk before it is trained on, and a step before the next one begins. So what a kill takes is work that
nobody was told of, and the rest can be done again bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from zerodrift.config.run import RunConfig
from zerodrift.core.errors import CheckpointMismatch, RecordError, RewardMisbound
from zerodrift.core.frozen import freeze
from zerodrift.core.version import WeightVersion
from zerodrift.engine.output import Output
from zerodrift.monitor.decision import State
from zerodrift.monitor.rewards import BoundReward, digest_of
from zerodrift.monitor.state import MonitorState, read_state, write_state
from zerodrift.records.codec import LineWriter, drop_torn_line, numbered_lines, write_atomically

RUN, ROLLOUTS, STEPS, JUDGED = "run.json", "rollouts.jsonl", "train.jsonl", "judged.json"
SCHEMA = 1


class RunHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that decides the bits of a training, beside its rollouts."""

    schema: int = SCHEMA
    config: RunConfig
    first: WeightVersion
    """The weights that it began with, after any warm-up."""
    numeric: Mapping[str, str]
    """How engine and trainer compute their forward."""
    torch: str
    threads: int
    """Gradients are sums, whose order depends on how many threads share them."""

    def __post_init__(self) -> None:
        """What it says of numerics cannot be changed."""
        freeze(self, "numeric")

    def require_same(self, other: "RunHeader") -> None:
        """Refuse to go on where a bit could differ; the number of steps is free to, and where a server is reached."""
        self.require_same_origin(other)
        ours, theirs = _without_place(self.config), _without_place(other.config)
        _require_equal("configuration", ours, theirs)

    def require_same_origin(self, other: "RunHeader") -> None:
        """Refuse what would compute otherwise, or began with other weights."""
        for name, ours, theirs in (
            ("torch", self.torch, other.torch),
            ("threads", self.threads, other.threads),
            ("numeric", dict(self.numeric), dict(other.numeric)),
            ("first weights", self.first, other.first),
        ):
            _require_equal(name, ours, theirs)


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rollouts of one prompt, each with its reward."""

    index: int
    """Of the prompt in the task's stream."""
    asked_at: int
    """Version that served when it was asked for."""
    outputs: tuple[Output, ...]
    rewards: tuple[BoundReward, ...]

    def values(self) -> list[float]:
        """The rewards, each of which belongs to the output that it stands beside."""
        for output, reward in zip(self.outputs, self.rewards, strict=True):
            if (reward.id, reward.digest) != output_id(output):
                raise RewardMisbound(
                    f"a reward for {reward.id} with digest {reward.digest} stands beside {output_id(output)[0]} with digest "
                    f"{output_id(output)[1]}; nothing was trained on"
                )
        return [reward.value for reward in self.rewards]

    @property
    def oldest(self) -> int:
        """Version of the oldest weights that any of its tokens, or the KV below it, comes from."""
        return min(version_number(version) for output in self.outputs for version in versions_of(output))


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of the schedule, and what came of it."""

    step: int
    groups: tuple[int, ...]
    dropped: tuple[int, ...]
    trained: bool
    """False where the monitor kept the batch back: the weights are those of the step before."""
    digest: str
    """Of the weights after it."""
    state: State
    reward: float
    loss: float
    grad_norm: float
    clip_rate: float
    kl: float | None
    """To the reference, in nats per token; None where none was asked for."""
    entropy: float | None
    ess: float | None
    lag: int
    tokens: int
    rescored: int
    """Tokens whose logprob was computed again under the weights that made them; of an exact engine each has the same bits."""
    seconds: float
    mismatch: float | None = None
    """Mean of |engine - trainer| over those tokens, in nats: exactly 0 of an exact engine; None where there are none."""
    mismatch_largest: float | None = None
    engine_kl: float | None = None
    """Mean k3 of the trainer's numbers against the engine's, lag included; None of runs from before it was kept."""


def version_label(number: int) -> str:
    """Of the weights after so many steps."""
    return f"step {number}"


def version_number(version: WeightVersion) -> int:
    """The steps that made it; a server's label says behind that which process sent it."""
    word, _, number = version.label.partition(" of ")[0].partition(" ")
    if word != "step" or not number.isdecimal():
        raise RecordError(f"weights are called {version.label!r}; a training calls its own 'step 7'")
    return int(number)


def versions_of(output: Output) -> set[WeightVersion]:
    """All weights that had a part in it: those of its logits, and those of the KV that they looked back on."""
    passes = [segment for each in output.past for segment in each.segments]
    return {span.version for span in (*output.versions, *output.lineage, *passes)}


def output_id(output: Output) -> tuple[str, str]:
    """Which output it is, and the digest of its tokens."""
    return f"{output.request_id}/{output.sample_index}", digest_of(output.token_ids)


class RunFiles:
    """The records of one run. One process writes."""

    def __init__(self, directory: Path) -> None:
        """Nothing is read or written yet."""
        self.directory = directory

    @property
    def exists(self) -> bool:
        """Whether a training was begun here."""
        return (self.directory / RUN).exists()

    def begin(self, header: RunHeader) -> None:
        """The first thing that is written."""
        write_atomically(self.directory / RUN, msgspec.json.format(msgspec.json.encode(header)))

    def header(self) -> RunHeader:
        """As it was begun."""
        path = self.directory / RUN
        try:
            found = msgspec.json.decode(path.read_bytes(), type=RunHeader)
        except FileNotFoundError as error:
            raise RecordError(f"{self.directory} has no {RUN}; no training was begun there") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RecordError(f"{path} cannot be read: {error}") from error
        if found.schema != SCHEMA:
            raise RecordError(f"{path} has schema {found.schema}, and this version reads {SCHEMA}")
        return found

    def groups(self) -> dict[int, GroupRecord]:
        """By index; of one that a kill had generated twice, the first, which is the one that was trained on."""
        found: dict[int, GroupRecord] = {}
        for each in self._read(ROLLOUTS, GroupRecord):
            found.setdefault(each.index, each)
        return found

    def steps(self) -> list[StepRecord]:
        """In order, each once."""
        found = list(self._read(STEPS, StepRecord))
        if [each.step for each in found] != list(range(len(found))):
            raise RecordError(
                f"{self.directory / STEPS} does not count its steps from 0; put it back as it was"
            )
        return found

    def keep_groups(self, groups: Sequence[GroupRecord]) -> None:
        """On the disk when this returns."""
        self._append(ROLLOUTS, *groups)

    def keep_step(self, step: StepRecord) -> None:
        """On the disk when this returns."""
        self._append(STEPS, step)

    def keep_monitor(self, state: MonitorState) -> None:
        """Before it judges a batch: a kill between that and `keep_step` must not leave the batch in its memory."""
        write_state(self.directory / JUDGED, state)

    def monitor_before(self) -> MonitorState:
        """What was kept last; a fresh one where nothing was judged yet."""
        return read_state(self.directory / JUDGED)

    def mend(self) -> None:
        """Cut off what a kill left half-written."""
        for name in (ROLLOUTS, STEPS):
            if (self.directory / name).exists():
                drop_torn_line(self.directory / name)

    def _read(self, name: str, kind: type[Any]) -> Iterator[Any]:
        path, decoder = self.directory / name, msgspec.json.Decoder(kind)
        for number, line in numbered_lines(path) if path.exists() else ():
            if not line.endswith(b"\n"):
                return  # a kill cut it off, and nobody heard of it
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise RecordError(f"{path}, line {number}: {error}") from error

    def _append(self, name: str, *values: Any) -> None:
        with LineWriter[Any](self.directory / name) as writer:
            writer.write(*values)


def _require_equal(name: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise CheckpointMismatch(
            f"the run was made with {name} {_shown(ours)}, and this one has {_shown(theirs)}; its bits would be "
            "others: go on as it was begun, or start another run"
        )


def _without_place(config: RunConfig) -> RunConfig:
    # As few steps as there may be: a fault is planted within them.
    train = msgspec.structs.replace(config.train, steps=config.train.inject_from + 1, admin_token_file=None)
    engine = msgspec.structs.replace(config.engine, url=None)
    return msgspec.structs.replace(config, train=train, engine=engine)


def _shown(value: object) -> str:
    return value.label if isinstance(value, WeightVersion) else f"{value!s:.300}"
