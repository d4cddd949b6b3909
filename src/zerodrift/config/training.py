"""How does `zerodrift train` learn: from which task, by which objective, how far behind its own weights?"""

from enum import StrEnum

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.core.request import MAX_SEED


class ObjectiveName(StrEnum):
    """One file each in `train/objectives/`."""

    REINFORCE_LOO = "reinforce-loo"
    GRPO = "grpo"
    PPO_CLIP = "ppo-clip"
    GSPO = "gspo"


class RolloutsFrom(StrEnum):
    """Who generates. A server is the one at `engine.url`."""

    EXACT = "exact"
    """The exact engine in this process."""
    REFERENCE = "reference"
    """Vanilla transformers in this process: the mismatch is measured, and is rounding's."""
    SERVE = "serve"
    """A `zerodrift serve`: the same bits, over HTTP."""
    VLLM = "vllm"
    """A vLLM: the mismatch is measured, and is not 0."""

    @property
    def in_process(self) -> bool:
        """Whether it generates in this process, and not at `engine.url`."""
        return self in (RolloutsFrom.EXACT, RolloutsFrom.REFERENCE)


class OnLag(StrEnum):
    """What becomes of rollouts that would be older than `max_lag` allows."""

    HOLD = "hold"
    """They are not asked for before they can be trained on in time."""
    DROP = "drop"
    """They are asked for as long as there is room, and dropped where they come too late."""


class UpdateKV(StrEnum):
    """What becomes of requests in flight when weights change."""

    DRAIN = "drain"
    """They end first: every rollout has one version, and the schedule follows from the configuration alone."""
    RECOMPUTE = "recompute"
    KEEP = "keep"


class Overlong(StrEnum):
    """Rollouts that were cut off at `max_tokens`."""

    KEEP = "keep"
    MASK = "mask"
    """They count in their group's baseline and not in the loss."""


class ZeroAdvantage(StrEnum):
    """Groups whose rewards are all equal."""

    SKIP = "skip"
    """They are no part of the loss nor of what it is divided by, KL and entropy included."""
    KEEP = "keep"


class CorrectionName(StrEnum):
    """Importance weights for the distance between engine and trainer, apart from the ratio of the update."""

    NONE = "none"
    TIS = "tis"
    """Weights above the cap become the cap."""
    MIS = "mis"
    """Weights above the cap, or below one over it, become 0."""


_COUNTS = {
    "steps": "train for at least one step",
    "groups": "a step has at least one prompt",
    "epochs": "a batch is learnt from at least once",
    "micro_batch_tokens": "a forward has at least one token",
    "rescore_one_in": "1 scores every sample again",
    "checkpoint_every": "it counts steps between two checkpoints",
}
_NOT_NEGATIVE = ("kl_coef", "entropy_coef", "weight_decay")


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training: task, batch, objective, lag, and how often it is checked and kept."""

    task: str = "sums"
    """Prompts with rewards: `sums`, which ships with zerodrift, or module:task."""
    rollouts: RolloutsFrom = RolloutsFrom.EXACT
    """Who generates: the `exact` engine or vanilla transformers (`reference`) in this process, or the server at `engine.url`:
    `serve` (ours) or `vllm`."""
    admin_token_file: str | None = None
    """With rollouts=serve: file of mode 0600 with the admin token, which the server named at its start."""
    inject: tuple[str, ...] = ()
    """Faults planted in an engine in this process, as `zerodrift audit --inject list` names them; its numbers are then measured."""
    inject_from: int = 0
    """Step from whose weights on they are there."""
    steps: int = 100
    """Batches to learn from."""
    groups: int = 32
    """Prompts per step."""
    samples: int = 8
    """Rollouts per prompt; they are each other's baseline."""
    objective: ObjectiveName = ObjectiveName.GRPO
    """What is made of rewards."""
    learning_rate: float = 5e-5
    """Of AdamW."""
    weight_decay: float = 0.0
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients longer than this are shortened to it, as a whole."""
    epochs: int = 1
    """Optimizer steps on each batch."""
    clip_low: float | None = None
    """Ratios below 1 - this earn nothing more; null takes the objective's own."""
    clip_high: float | None = None
    """Ratios above 1 + this earn nothing more; null takes the objective's own."""
    kl_coef: float = 0.0
    """Weight of the KL (k3) to the weights that the run began with; 0 leaves it out, and its forward."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus, estimated from the sampled tokens."""
    overlong: Overlong = Overlong.KEEP
    """Rollouts that were cut off."""
    zero_advantage: ZeroAdvantage = ZeroAdvantage.SKIP
    """Groups that teach nothing."""
    correction: CorrectionName = CorrectionName.NONE
    """Off unless the engine is known to be right: a correction hides one that is not."""
    correction_cap: float = 2.0
    """Of the correction's weights."""
    max_lag: int = 1
    """Versions that a token may be behind the weights that learn from it; 0 generates and learns in turn."""
    on_lag: OnLag = OnLag.HOLD
    """Hold rollouts back, or drop those that come too late."""
    buffer_groups: int | None = None
    """Groups that may be in flight or waiting; null: as many as `max_lag` + 1 steps need."""
    kv: UpdateKV = UpdateKV.DRAIN
    """Requests in flight when weights change."""
    rescore_one_in: int = 16
    """One in so many samples is scored again under the weights that made it, and must have the same bits. Those of the
    current weights are, without exception, by the forward that learns."""
    checkpoint_every: int = 10
    """Steps between two checkpoints."""
    reward_timeout_s: float = 60.0
    """Longest that the rewards of one group may take."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward and backward; a batch is packed into as many as it takes."""
    warmup_steps: int = 20
    """Supervised steps that a built-in model is given first, which is else random; 0 gives none."""
    seed: int = 0
    """Prompts and noise follow from it."""

    def __post_init__(self) -> None:
        """A training that could never begin, or never end, is refused."""
        if not self.task:
            raise InvalidValue("task is an empty string; name one, as in sums or my_module:task")
        if self.admin_token_file is not None and self.rollouts is not RolloutsFrom.SERVE:
            raise InvalidValue(
                f"admin_token_file is given with rollouts={self.rollouts}, which has no use for it; leave it out"
            )
        if self.rollouts is not RolloutsFrom.EXACT and self.kv is not UpdateKV.DRAIN:
            raise InvalidValue(
                f"kv is {self.kv} with rollouts={self.rollouts}, and its answers do not say which weights wrote their KV; leave it "
                "at drain"
            )
        self._check_planted()
        for name, rule in _COUNTS.items():
            require.whole(InvalidValue, name, getattr(self, name), rule, 1)
        rule = "rollouts of one prompt are each other's baseline, which takes two"
        require.whole(InvalidValue, "samples", self.samples, rule, 2)
        require.whole(InvalidValue, "max_lag", self.max_lag, "it counts versions", 0)
        require.whole(InvalidValue, "warmup_steps", self.warmup_steps, "0 gives none", 0)
        require.whole(InvalidValue, "seed", self.seed, "it is a 63-bit count", 0, MAX_SEED)
        for name in _NOT_NEGATIVE:
            require.real(InvalidValue, name, getattr(self, name), "it is a weight, and 0 leaves it out", 0)
        for name in ("learning_rate", "max_grad_norm", "reward_timeout_s"):
            require.real(InvalidValue, name, getattr(self, name), "it is a positive number", 1e-12)
        for name in ("clip_low", "clip_high"):
            if (value := getattr(self, name)) is not None:
                require.real(InvalidValue, name, value, "it lies between 0 and 1; null takes the own", 0, 1)
        rule = "weights are cut there and at one over it, so it is at least 1"
        require.real(InvalidValue, "correction_cap", self.correction_cap, rule, 1)
        self._check_room()

    @property
    def capacity(self) -> int:
        """Groups that may be in flight or waiting."""
        return (self.max_lag + 1) * self.groups if self.buffer_groups is None else self.buffer_groups

    def _check_planted(self) -> None:
        """Nothing is planted in an engine that is not ours, and nothing is planted later than the end."""
        require.whole(InvalidValue, "inject_from", self.inject_from, "it counts steps", 0)
        if not self.inject:
            if self.inject_from:
                raise InvalidValue(
                    f"inject_from is {self.inject_from}, and inject names no fault; name one, or leave both out"
                )
            return
        if not self.rollouts.in_process or self.kv is not UpdateKV.DRAIN:
            raise InvalidValue(
                f"inject plants faults in an engine of this process (rollouts: exact or reference), with updates that drain what is "
                f"in flight; rollouts is {self.rollouts} and kv is {self.kv}"
            )
        if self.inject_from >= self.steps:
            raise InvalidValue(
                f"inject_from is {self.inject_from}, and the training has {self.steps} steps, so that nothing would be planted; "
                "lower it"
            )

    def _check_room(self) -> None:
        """A lag bound that no batch could meet, or a room that no group could ever fill."""
        most = (self.max_lag + 1) * self.groups
        rule = f"a step takes {self.groups} groups at once, and would wait for ever for the last of them"
        require.whole(InvalidValue, "buffer_groups", self.capacity, rule, self.groups)
        if self.on_lag is OnLag.HOLD and self.capacity > most:
            raise InvalidValue(
                f"buffer_groups is {self.capacity}, and with max_lag={self.max_lag} and groups={self.groups} at most {most} "
                "groups can be trained on in time; lower it, raise max_lag, or drop what is late (on_lag=drop)"
            )
