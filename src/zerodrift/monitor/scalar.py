"""Where only one number per step is at hand: the chart of `log_step`.

Its scale is learnt from the first values, so that it knows less than `observe`: no strata, no replicas, and a fault that
was there from the start is healthy unless it is above the gate.
"""

import math

import msgspec

from zerodrift.monitor.decision import Code, Gap, Reason
from zerodrift.monitor.tracks import GAIN, QUARANTINE, RATE
from zerodrift.stats.sequential import Cusum

WARM_UP = 20
LEAST_DEVIATION = 0.05
"""Of log KL. k3 of 200,000 tokens varies by 4 % between healthy batches."""
LEAST = 1e-12
"""Nats. An exact engine gives 0, and a logarithm needs something."""


_NOTHING = Reason(
    code=Code.NOT_OBSERVED,
    gap=Gap.MISMATCH,
    message="kl_estimate is exactly 0. An exact engine's is, and so is a metric that nobody fills in, or the gap to a trainer that took the "
    "engine's logprobs for its own: look where the number comes from",
)


class ScalarTrack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean and spread of the logarithm, and a CUSUM of what lies above."""

    values: int = 0
    mean: float = 0.0
    squares: float = 0.0
    cusum: Cusum = Cusum(allowance=1.0, threshold=QUARANTINE)

    @property
    def deviation(self) -> float:
        """Of one value."""
        return max(LEAST_DEVIATION, math.sqrt(self.squares / max(1, self.values - 1)))

    def update(self, kl: float) -> "ScalarTrack":
        """With one more step."""
        level = math.log(max(kl, LEAST))
        if self.values < WARM_UP:
            values, step = self.values + 1, level - self.mean
            mean = self.mean + step / values
            return msgspec.structs.replace(
                self, values=values, mean=mean, squares=self.squares + step * (level - mean)
            )
        cusum = self.cusum.update((level - self.mean) / self.deviation)
        # k3 goes with the square of |Δ|, so its logarithm may follow twice as fast; and not while it is in doubt.
        move = 0.0 if cusum.score else min(max(GAIN * (level - self.mean), -2 * RATE), 2 * RATE)
        return msgspec.structs.replace(self, cusum=cusum, mean=self.mean + move)


def judge_scalar(
    track: ScalarTrack, kl: float, reward_mean: float | None, gate: float, *, vouched: bool
) -> tuple[ScalarTrack, tuple[Reason, ...]]:
    """The track after this step, and what is wrong with it. `vouched`: somebody knows that it may be exactly 0."""
    for name, value in (("kl_estimate", kl), ("reward_mean", reward_mean)):
        if value is not None and not math.isfinite(value):
            message = f"{name} is {value}; a number that is not finite is no measurement"
            return track, (Reason(code=Code.NOT_FINITE, message=message, where=name),)
    # k3 is never negative, but k1 is where its sign was swapped or noise outweighs it: its size counts.
    found = []
    above = abs(kl) > gate
    asked = () if kl or track.values or vouched else (_NOTHING,)
    if not above or track.values >= WARM_UP:
        track = track.update(abs(kl))
    if above:
        found.append((Code.GATE, f"kl_estimate is {kl:.3g}, and the gate {gate:.3g}", kl, gate))
    if track.cusum.alarm:
        score, limit = track.cusum.score, track.cusum.threshold
        found.append((Code.SCALE, f"kl_estimate has been above its baseline, now {kl:.3g}", score, limit))
    bad = tuple(
        Reason(code=code, gap=Gap.MISMATCH, message=message, value=value, limit=limit)
        for code, message, value, limit in found
    )
    return track, (*bad, *asked)
