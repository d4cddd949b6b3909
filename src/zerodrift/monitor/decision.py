"""What the monitor says of one batch: a state, reasons that programs can read, and every number behind them.

A number that the given arrays cannot show is `NotObservable`, with what would show it. It is never 0: a mismatch that
nobody measured looks like a healthy one on every dashboard.
"""

from enum import StrEnum
from typing import ClassVar

import msgspec


class State(StrEnum):
    """How far the breaker is open."""

    OK = "OK"
    WARN = "WARN"
    """Train, and look."""
    QUARANTINE = "QUARANTINE"
    """Do not train on this batch."""
    HALT = "HALT"
    """Do not train on anything that this engine makes until somebody has looked."""


class Gap(StrEnum):
    """Three distances that one ratio mixes up."""

    MISMATCH = "mismatch"
    """Engine against trainer under the same weights: drift."""
    STALENESS = "staleness"
    """The weights that made a token against those that the step began with."""
    UPDATE = "update"
    """The weights that the step began with against those of now: learning."""


class Code(StrEnum):
    """Why a batch is not simply fine. Stable: programs may match on it."""

    # Trips: the batch is bad by itself, whatever came before.
    NOT_FINITE = "not-finite"
    MISSING_LOGPROBS = "missing-logprobs"
    NOT_A_LOGPROB = "not-a-logprob"
    IMPOSSIBLE_RATIO = "impossible-ratio"
    NOTHING_TO_JUDGE = "nothing-to-judge"
    VERSION_BACKWARDS = "version-backwards"
    VERSION_UNKNOWN = "version-unknown"
    REWARD_MISBOUND = "reward-misbound"
    REWARD_NOT_FINITE = "reward-not-finite"
    ALERT = "alert"
    # Levels: too large in this batch.
    GATE = "above-gate"
    JUMP = "jump"
    ESS = "low-ess"
    LAG = "lag"
    # Charts: too large for too long.
    BIAS = "bias"
    SCALE = "scale"
    # Worth a look.
    TAIL = "tail"
    BASELINE_MOVED = "baseline-moved"
    NOT_OBSERVED = "not-observed"
    PADDING = "padding"
    REWARD_SHIFT = "reward-shift"
    HALF_OPEN = "half-open"
    HALTED = "halted"
    ACTION_FAILED = "action-failed"
    NOT_ARCHIVED = "not-archived"

    @property
    def bad(self) -> bool:
        """The batch must not be trained on."""
        return self not in _LOOK


_LOOK = {
    Code.TAIL,
    Code.BASELINE_MOVED,
    Code.NOT_OBSERVED,
    Code.PADDING,
    Code.REWARD_SHIFT,
    Code.HALF_OPEN,
    Code.HALTED,
    Code.ACTION_FAILED,
    Code.NOT_ARCHIVED,
}


class Reason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that is not as it should be."""

    code: Code
    message: str
    gap: Gap | None = None
    """Which of the three is too large; None where it is not about one."""
    where: str = ""
    """`replica=3`, `environment=math`, `log p=…`; empty for the whole batch."""
    value: float | None = None
    limit: float | None = None
    warning: bool = False
    """A chart on its way, or a batch that chance may have put above a gate: not enough to keep a batch back."""

    @property
    def bad(self) -> bool:
        """The batch must not be trained on."""
        return self.code.bad and not self.warning


class NotObservable(msgspec.Struct, frozen=True, tag="not-observable", forbid_unknown_fields=True):
    """A gap that these numbers cannot show."""

    why: str
    observable: ClassVar[bool] = False


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured", forbid_unknown_fields=True):
    """A gap over the tokens that show it. Nothing in it is clamped."""

    tokens: int
    bias: float
    """Mean of Δ = log of the later policy - log of the earlier."""
    mean_abs: float
    p50: float
    p90: float
    p99: float
    max: float
    """Of |Δ|; quantiles are within 6 %."""
    k1: float
    k2: float
    k3: float
    mean_ratio: float
    """Mean of exp(Δ): 1 in expectation, whatever the gap, if tokens were drawn from what was reported."""
    token_ess: float
    sequence_ess: float
    clipped_below: float
    clipped_above: float
    """Share of ratios that leave the trainer's [1 - ε, 1 + ε]."""
    observable: ClassVar[bool] = True

    @property
    def clip_rate(self) -> float:
        """Share outside on either side."""
        return self.clipped_below + self.clipped_above


GapView = Measured | NotObservable


class GroupView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mismatch of some of the tokens: one replica, one environment, one stratum."""

    kind: str
    label: str
    tokens: int
    mean_abs: float
    bias: float
    """Mean ratio - 1, each token counted for at most one nat."""
    against_baseline: float
    """Mean |Δ| over what the baseline expects of tokens as likely as these; 1 is healthy."""


class RatioView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ratios that the loss would see, and what the trainer's correction makes of them."""

    raw_mean: float
    raw_min: float
    raw_max: float
    raw_ess: float
    corrected_mean: float
    corrected_min: float
    corrected_max: float
    changed: float
    """Share of tokens whose ratio the correction changed: what it hides."""


class BaselineView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What this batch was held against."""

    source: str
    mean_abs: float
    """Expected of this batch's tokens, given how likely they are."""
    bias: float
    growth: float
    """How far the level has followed the policy since the baseline was taken: 1.2 is a fifth more."""


class RewardView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This batch's rewards beside the window before it."""

    count: int
    mean: float
    baseline_count: int = 0
    baseline_mean: float | None = None
    baseline_margin: float | None = None
    """How far from it the mean of a batch of this size may lie by chance."""
    p_value: float | None = None
    """Of the two-sample test; None where none was made."""
    misbound: int = 0
    """Rewards refused so far because they belong to another output."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to one `observe`."""

    step: int
    state: State
    would_be: State
    """The state if the breaker were enabled; differs from `state` only where `circuit_breaker_enabled` is false."""
    reasons: tuple[Reason, ...] = ()
    tokens: int = 0
    sequences: int = 0
    mismatch: GapView
    staleness: GapView
    update: GapView
    total: GapView
    """The trainer's newest numbers against the engine's: what a loss without separate terms sees."""
    entropy: float | None = None
    """-mean log p of the sampled tokens: an unbiased estimate in nats."""
    lag_mean: float | None = None
    lag_max: int | None = None
    ratios: RatioView | None = None
    """None where no correction was declared."""
    groups: tuple[GroupView, ...] = ()
    baseline: BaselineView | None = None
    """None until there is one."""
    rewards: RewardView | None = None
    reference_kl: float | None = None
    """As it was given: it grows because the model learns, and trips nothing."""
    kl_estimate: float | None = None
    """As `log_step` was given it; None from `observe`, which measures."""
    probe_due: bool = False
    """Time for what costs something: a canary, re-scored samples, reference rewards."""

    @property
    def train(self) -> bool:
        """Whether this batch may be trained on."""
        return self.state in {State.OK, State.WARN}

    @property
    def bad(self) -> bool:
        """Whether somebody should look at this batch, trained on or not: it is archived where the breaker is off, too."""
        return not self.train or any(reason.bad for reason in self.reasons)

    @property
    def gap(self) -> Gap | None:
        """The gap that the first bad reason names."""
        return next((reason.gap for reason in self.reasons if reason.bad), None)
