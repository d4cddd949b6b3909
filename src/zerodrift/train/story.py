"""The four faults of the V0 → V1 story, each in a training of its own, all at once, and mended one after another (docs/story.md).

Torch-free: which trainings there are, and how each differs from the sound one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from zerodrift.config.load import load
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import InvalidValue

RAW, CACHE, KV, HEAD = (
    "semantic/raw-logprobs:default", "weights/stale-prefix-cache:kept", "weights/torn:kv-kept", "path/head-precision:bf16",
)  # fmt: skip
SETTINGS = (
    "model.path=testbed:llama", "sampling_defaults.max_tokens=3", "sampling_defaults.temperature=0.7",
    "monitoring.circuit_breaker_enabled=false", "train.rollouts=reference", "train.task=shown-sums", "train.groups=25",
    "train.samples=8", "train.steps=12", "train.warmup_steps=40", "train.learning_rate=0.00005", "train.entropy_coef=0.05",
    "train.zero_advantage=keep", "train.max_lag=0", "train.objective=gspo",
)  # fmt: skip
"""Of every condition. At four times the learning rate the sound training itself gave every sum one answer after three steps."""
FROM = 1
"""Weights from which on the faults are there: those of before are then the policy's own, not what a built-in model is born with."""


class Condition(NamedTuple):
    """One kind of training."""

    name: str
    title: str
    faults: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    against: str = "sound"
    """What it is held against."""


CONDITIONS = (
    Condition("sound", "sound engine"),
    Condition("raw", "raw logprobs", (RAW,)),
    Condition("head", "head in bf16", (HEAD,)),
    Condition("cache", "stale prefix cache", (CACHE,)),
    Condition("kv", "KV kept over updates", (KV,)),
    Condition("all", "all four", (RAW, CACHE, KV, HEAD)),
    Condition("mended-1", "logprobs mended", (CACHE, KV, HEAD)),
    Condition("mended-2", "and the cache", (KV, HEAD)),
    Condition("exact", "exact engine", (), ("train.rollouts=exact",)),
    Condition("sound-grpo", "sound, by GRPO", (), ("train.objective=grpo",)),
    Condition("raw-grpo", "raw, by GRPO", (RAW,), ("train.objective=grpo",), "sound-grpo"),
)
"""In the order in which they are run: what is held against comes before what is held."""


class StoryPiece(NamedTuple):
    """One training of the story."""

    condition: Condition
    seed: int
    config: RunConfig
    directory: Path

    @property
    def name(self) -> str:
        """As on a bar."""
        return f"{self.condition.name}, seed {self.seed}"


def pieces(seeds: int, out: Path, settings: Sequence[str] = (), only: Sequence[str] = ()) -> list[StoryPiece]:
    """Every training: for each condition all of its seeds, the same in each. `settings` hold for all."""
    return [
        StoryPiece(condition, seed, _config(condition, seed, settings), out / f"{condition.name}-seed-{seed}")
        for condition in chosen(only)
        for seed in range(seeds)
    ]


def chosen(only: Sequence[str]) -> list[Condition]:
    """Those that are named, in our order; all of them where none is."""
    known = [condition.name for condition in CONDITIONS]
    if strange := [name for name in only if name not in known]:
        raise InvalidValue(f"there is no condition {strange[0]!r} in the story; it has {', '.join(known)}")
    return [condition for condition in CONDITIONS if not only or condition.name in only]


def _config(condition: Condition, seed: int, settings: Sequence[str]) -> RunConfig:
    config = load(None, [*SETTINGS, *condition.settings, *settings, f"train.seed={seed}"])
    faults = {"inject": condition.faults, "inject_from": FROM} if condition.faults else {}
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, **faults))
