"""How much are these samples worth to the target policy?

ρ = exp(r), r = log target - log behaviour, per token or per sequence. Effective sample size is normalised to
(0, 1], ESS = (Σρ)² / (n Σρ²), and always of the ratios as they are: an ESS of clipped or truncated ratios looks
healthy for exactly the tokens that are not.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, log_ratios
from zerodrift.stats.sequences import sequence_sums


class ClipFraction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of tokens whose ratio leaves [1 - low, 1 + high], whatever the sign of their advantage."""

    below: float
    above: float

    @property
    def total(self) -> float:
        """Share outside on either side."""
        return self.below + self.above


def token_ess(r: npt.ArrayLike) -> float:
    """ESS over tokens; 1 where all ratios are equal, 1/n where one token outweighs the rest."""
    return WeightSums.of(log_ratios(r)).ess


def sequence_ess(r: npt.ArrayLike, sequence_ids: npt.ArrayLike) -> float:
    """ESS over sequences, each weighted by the product of its token ratios."""
    return WeightSums.of(log_product_ratios(r, sequence_ids)).ess


def log_product_ratios(r: npt.ArrayLike, sequence_ids: npt.ArrayLike) -> Floats:
    """Σr of each sequence: the log of its importance ratio. Unbounded, so it travels as a log."""
    return sequence_sums(log_ratios(r), sequence_ids)


def clip_fraction(r: npt.ArrayLike, *, low: float, high: float) -> ClipFraction:
    """Share of tokens outside [1 - low, 1 + high]; PPO's symmetric ε is low = high = ε."""
    require.real(InvalidValue, "low", low, "it is subtracted from 1 and the bound must stay positive", 0)
    require.real(InvalidValue, "high", high, "it is added to 1, so it is at least 0", 0)
    if low >= 1:
        raise InvalidValue(
            f"low is {low}; no ratio lies below 1 - low = {1 - low}, so nothing would ever clip"
        )
    array = log_ratios(r)
    return ClipFraction(float((array < np.log1p(-low)).mean()), float((array > np.log1p(high)).mean()))


class WeightSums(NamedTuple):
    """Sums of weights relative to the largest: they lie in [0, 1], one of them is 1, and no sum can vanish."""

    size: int
    log_largest: float
    total: float
    squares: float

    @classmethod
    def of(cls, log_weights: Floats) -> "WeightSums":
        """The sums of exp(log_weights)."""
        largest = log_weights.max()
        weights: Floats = np.exp(log_weights - largest)
        return cls(weights.size, float(largest), float(weights.sum()), float((weights * weights).sum()))

    def at(self, log_largest: float) -> "WeightSums":
        """The same sums relative to another, larger weight."""
        scale = math.exp(self.log_largest - log_largest)
        return WeightSums(self.size, log_largest, self.total * scale, self.squares * scale * scale)

    @property
    def ess(self) -> float:
        """(Σw)² / (n Σw²)."""
        # Cauchy-Schwarz says at most 1; the last bit of two sums of near-equal weights may not.
        return min(self.total * self.total / (self.size * self.squares), 1.0)
