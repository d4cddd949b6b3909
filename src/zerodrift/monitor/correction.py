"""What the trainer's correction makes of the ratios: declared to the monitor, so that it can be seen from outside.

A correction is a function of the raw token ratios. Metrics that frameworks log are taken after it; with the raw ones
beside them, and the share that was changed, a correction cannot pass for a healthy engine.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.monitor.decision import RatioView
from zerodrift.monitor.gaps import GapSums
from zerodrift.stats.arrays import Floats

Correction = Callable[[Floats], Floats]


def truncated(cap: float) -> Correction:
    """TIS: ratios above `cap` become `cap`."""
    require.real(InvalidValue, "cap", cap, "ratios are truncated there, so it is positive", 1e-9)
    return lambda ratios: np.minimum(ratios, cap)


def masked(low: float, high: float) -> Correction:
    """MIS, IcePop: tokens with ratios outside [low, high] get 0."""
    require.real(InvalidValue, "low", low, "it is a ratio", 0.0)
    require.real(InvalidValue, "high", high, "it is a ratio above `low`", low)
    return lambda ratios: np.where((ratios >= low) & (ratios <= high), ratios, 0.0)


class CorrectedSums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Corrected ratios of one batch, in numbers that ranks can add."""

    tokens: int
    total: float
    least: float
    most: float
    changed: int
    raw_least: float
    raw_most: float

    @classmethod
    def of(cls, delta: Floats, correction: Correction) -> "CorrectedSums":
        """Of Δ = log of the newest - log of the behaviour."""
        raw = np.exp(delta)
        # Its own copy: one that clips in place would have the raw ones look like what it made of them.
        corrected = np.asarray(correction(raw.copy()), dtype=np.float64)
        if corrected.shape != raw.shape or not np.isfinite(corrected).all():
            raise InvalidValue("the correction must give one finite ratio per token")
        return cls(
            tokens=raw.size,
            total=float(corrected.sum()),
            least=float(corrected.min()),
            most=float(corrected.max()),
            changed=int(np.count_nonzero(corrected != raw)),
            raw_least=float(raw.min()),
            raw_most=float(raw.max()),
        )

    def __add__(self, other: "CorrectedSums") -> "CorrectedSums":
        """Both."""
        return CorrectedSums(
            tokens=self.tokens + other.tokens,
            total=self.total + other.total,
            least=min(self.least, other.least),
            most=max(self.most, other.most),
            changed=self.changed + other.changed,
            raw_least=min(self.raw_least, other.raw_least),
            raw_most=max(self.raw_most, other.raw_most),
        )

    def view(self, total: GapSums) -> RatioView:
        """Side by side with the raw ones."""
        return RatioView(
            raw_mean=total.summary.mean_ratio,
            raw_min=self.raw_least,
            raw_max=self.raw_most,
            raw_ess=total.summary.ess,
            corrected_mean=self.total / self.tokens,
            corrected_min=self.least,
            corrected_max=self.most,
            changed=self.changed / self.tokens,
        )
