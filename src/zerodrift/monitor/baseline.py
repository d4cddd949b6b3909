"""What a healthy engine shows on this policy: a curve from how likely a token is to the |Δ| that rounding gives it.

The curve comes from an audit, a canary, or, where nobody has either, the first batches. An audit's verdict states the
level and the gates, and leaves the shape of the curve to the first batches, which must then stay below those gates.
It moves in two ways. A canary replaces it. Between canaries its level follows the policy, at most RATE for each version
of the weights that the trainer made: no new weights, no movement. So a step cannot hide in it at all, and a ramp only if it
is slower than the policy moves; how far it has gone is reported, and the gates never move.
"""

import math
from typing import Any

import msgspec
import numpy as np

from zerodrift.config.monitoring import MonitoringConfig
from zerodrift.config.precision import PROFILES, Magnitude, Precision
from zerodrift.core.errors import InvalidValue
from zerodrift.drift.summary import Workspace
from zerodrift.monitor.host import host, numbers
from zerodrift.monitor.intake import HIGHEST
from zerodrift.monitor.lookalikes import handed_twice
from zerodrift.monitor.strata import RARITIES, Counted, count
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.stats.arrays import Floats, Ids

WARM_UP = 10
"""Batches. Ten of 20,000 tokens know the mean of |Δ| to 0.5 %, a sixth of the slack that the charts allow."""
LEAST_TOKENS = 2_000
"""Of a canary. A curve of six points on fewer is mostly noise."""
CANARY_GROWTH = 1.25
"""Times the expected |Δ| that an untrusted canary may show: what the policy can have done since the last step, and not
what a fault does."""
_SHAPE = (0.05, 0.3, 1.0, 1.6, 2.0, 2.2)
"""|Δ| of a rarity against the mean, where a stratum has too few tokens to say: logits that are all off by the same σ move
log p by about σ(1 - p). Only ever used for strata of fewer than LEAST_OF_STRATUM tokens."""
LEAST_OF_STRATUM = 50


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A curve, a bias and where they come from."""

    source: str
    """`canary`, `audit and first batches` or `first batches`."""
    scales: tuple[float, ...]
    """Mean |ψ| of each rarity."""
    bias: float
    """Mean of exp(ψ) - 1."""
    mean_abs: float
    """Mean |ψ| of the tokens that it was taken from."""

    def __post_init__(self) -> None:
        """A curve has one positive point per rarity."""
        if len(self.scales) != RARITIES or not all(
            value > 0 and math.isfinite(value) for value in self.scales
        ):
            raise InvalidValue(
                f"scales are {self.scales}; a baseline has {RARITIES} positive numbers: take it again"
            )

    def expected(self, tokens: Floats) -> Floats:
        """Σ |ψ| that the baseline expects, over the last axis."""
        result: Floats = tokens @ np.array(self.scales)
        return result


class WarmUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums of the first batches."""

    batches: int = 0
    tokens: tuple[float, ...] = (0.0,) * RARITIES
    sizes: tuple[float, ...] = (0.0,) * RARITIES
    ratio: float = 0.0

    def __add__(self, other: "WarmUp") -> "WarmUp":
        """Both."""
        return WarmUp(
            batches=max(self.batches, other.batches),
            tokens=tuple(a + b for a, b in zip(self.tokens, other.tokens, strict=True)),
            sizes=tuple(a + b for a, b in zip(self.sizes, other.sizes, strict=True)),
            ratio=self.ratio + other.ratio,
        )

    @classmethod
    def of(cls, counted: Counted) -> "WarmUp":
        """What one batch adds."""
        return cls(
            batches=1,
            tokens=tuple(counted.tokens.sum(axis=(0, 1)).tolist()),
            sizes=tuple(counted.size.sum(axis=(0, 1)).tolist()),
            ratio=float(counted.ratio.sum()),
        )

    def then(self, other: "WarmUp") -> "WarmUp":
        """One more batch, of all ranks."""
        return msgspec.structs.replace(self + other, batches=self.batches + 1)

    def baseline(self, source: str) -> Baseline:
        """The curve of everything so far."""
        tokens, sizes = np.array(self.tokens), np.array(self.sizes)
        if not sizes.sum():
            # Both sides agree to the last bit. What a report in fp32 resolves is then the least that can be told apart.
            return Baseline(source=source, scales=(2.0**-24,) * RARITIES, bias=0.0, mean_abs=0.0)
        shape = np.array(_SHAPE)
        known = np.flatnonzero((tokens >= LEAST_OF_STRATUM) & (sizes > 0))
        if known.size:
            # By the nearest that is known: of a sharp policy the certain tokens are many, and far below the shape.
            nearest = known[np.abs(np.arange(RARITIES)[:, None] - known).argmin(axis=1)]
            scales = sizes[nearest] / tokens[nearest] * shape / shape[nearest]
        else:
            scales = sizes.sum() / (shape @ tokens) * shape
        count = float(tokens.sum())
        return Baseline(
            source=source,
            scales=tuple(scales.tolist()),
            bias=self.ratio / count,
            mean_abs=float(sizes.sum()) / count,
        )


def of_canary(behavior_logprobs: Any, trainer_logprobs: Any, source: str = "canary") -> Baseline:
    """From logprobs of the same tokens under the same weights, of an engine that is known to be good."""
    given = {"behavior_logprobs": behavior_logprobs, "trainer_logprobs": trainer_logprobs}
    arrays = {name: host(name, value) for name, value in given.items()}
    if handed_twice(given, arrays):
        raise InvalidValue(
            "a canary of one array handed in twice compares nothing; give the trainer's own forward"
        )
    first, second = arrays.values()
    if first.ndim == second.ndim and first.shape != second.shape:
        raise InvalidValue(
            f"a canary of shapes {first.shape} and {second.shape}; give as many tokens of each, in one order"
        )
    behavior = numbers("behavior_logprobs", behavior_logprobs)
    trainer = numbers("trainer_logprobs", trainer_logprobs)
    if behavior.shape != trainer.shape or behavior.size < LEAST_TOKENS:
        raise InvalidValue(
            f"a canary of {behavior.size} and {trainer.size} tokens; give as many of each, {LEAST_TOKENS} at least"
        )
    both = np.concatenate([behavior, trainer])
    if not np.isfinite(both).all() or both.max() > HIGHEST:
        raise InvalidValue(
            "a canary has a logprob that is not finite, or above 0; that engine is not healthy"
        )
    lengths: Ids = np.array([behavior.size], dtype=np.int64)
    counted = count(Workspace(behavior.size).block(trainer, behavior), trainer, lengths, None)
    return WarmUp.of(counted).baseline(source)


def check_below(baseline: Baseline, gate: Magnitude) -> None:
    """What lies above the gate is a fault, and no baseline."""
    if baseline.mean_abs > gate.mean_abs:
        raise InvalidValue(
            f"the {baseline.source} shows a mean |Δ| of {baseline.mean_abs:.3g}, above the gate {gate.mean_abs:.3g}; audit "
            "the engine before you train on it"
        )


def check_grown(fresh: Baseline, old: Baseline, factor: float) -> None:
    """`factor`: how far the level has followed the policy since the old one was taken."""
    grown = float(np.median(np.array(fresh.scales) / np.array(old.scales))) / factor
    if grown > CANARY_GROWTH:
        raise InvalidValue(
            f"the canary shows {grown:.2f} times the |Δ| that the monitor expects; find out why, or measure with an "
            "engine that is known to be good and say trusted=True"
        )


def limits(config: MonitoringConfig, precision: Precision, verdict: VerdictRecord | None) -> Magnitude:
    """The gates: an audit's where there is one, else the precision's, and `kl_threshold` before both."""
    gate = PROFILES[precision].gate
    if verdict is not None:
        if verdict.verdict is not Outcome.PASS:
            raise InvalidValue(f"the audit says {verdict.verdict}; only one that passes can be a baseline")
        told = {"mean_abs": "mean", "p90_abs": "p90", "k3": "k3"}
        gate = Magnitude(**{name: verdict.gates.get(key, getattr(gate, name)) for name, key in told.items()})
    if config.kl_threshold is not None:
        # k3 is about Δ²/2, so the others follow by the root: of gates that disagree one decides alone.
        factor = math.sqrt(config.kl_threshold / gate.k3)
        gate = Magnitude(
            mean_abs=gate.mean_abs * factor, p90_abs=gate.p90_abs * factor, k3=config.kl_threshold
        )
    return gate
