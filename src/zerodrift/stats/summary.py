"""What does one line say about the drift of a set of tokens?

Δ = log target - log behaviour per token, in nats. Means and p90 are what gates read (stable); k3 is what people
compare across frameworks; the maximum is a veto, not a measure: it grows with the number of tokens.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from zerodrift.stats.arrays import log_ratios
from zerodrift.stats.kl import k3


class DeltaSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """|Δ| of a set of tokens, unless a field says otherwise."""

    count: int
    mean: float
    signed_mean: float
    """Mean of Δ itself: a bias, where `mean` is a distance."""
    rms: float
    p50: float
    p90: float
    p99: float
    max: float
    k3: float
    """Mean of exp(Δ) - 1 - Δ: the KL from behaviour to target in nats per token."""
    above_tenth: float
    """Share of tokens with |Δ| > 0.1: ratios outside 0.90…1.11."""
    above_one: float
    """Share of tokens with |Δ| > 1: no rounding does that."""


def summarise(delta: npt.ArrayLike) -> DeltaSummary:
    """Quantiles interpolate linearly between order statistics, as numpy does by default."""
    signed = log_ratios(delta)
    size = np.abs(signed)
    p50, p90, p99 = (float(value) for value in np.quantile(size, (0.5, 0.9, 0.99)))
    return DeltaSummary(
        count=signed.size,
        mean=float(size.mean()),
        signed_mean=float(signed.mean()),
        rms=float(np.sqrt(np.mean(signed * signed))),
        p50=p50,
        p90=p90,
        p99=p99,
        max=float(size.max()),
        k3=float(k3(signed).mean()),
        above_tenth=float((size > 0.1).mean()),
        above_one=float((size > 1).mean()),
    )
