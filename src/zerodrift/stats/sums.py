"""How is drift added up over shards, workers and steps without keeping the tokens?

A few sums are enough for every mean that is reported. They form a commutative monoid: `DriftSums()` is the empty
set and `+` is the union of disjoint sets of tokens, exact for the count and up to float64 rounding for the rest.
"""

import math

import msgspec
import numpy as np
import numpy.typing as npt

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats.arrays import log_ratios
from zerodrift.stats.kl import k3
from zerodrift.stats.ratios import WeightSums


class DriftSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over tokens of Δ = log target - log behaviour, of its KL estimate, and of ρ = exp(Δ)."""

    count: int = 0
    delta: float = 0.0
    absolute: float = 0.0
    squared: float = 0.0
    k3: float = 0.0
    largest: float = 0.0
    """max Δ, 0 of no tokens: the two sums below are relative to it, since below -372 nats ρ² is no float."""
    ratio: float = 0.0
    ratio_squared: float = 0.0

    def __post_init__(self) -> None:
        """Sums read back from a file are refused like any other number."""
        require.whole(InvalidValue, "count", self.count, "it counts tokens", 0)
        least = {"delta": -math.inf, "largest": -math.inf}
        if self.count:
            least |= {"ratio": 1.0, "ratio_squared": 1.0}
        for name in DriftSums.__struct_fields__[1:]:
            low = least.get(name, 0.0)
            require.real(NonFinite, f"sum of {name}", getattr(self, name), "it is a sum over tokens", low)

    @classmethod
    def of(cls, delta: npt.ArrayLike) -> "DriftSums":
        """The sums of one batch of tokens."""
        array = log_ratios(delta)
        weights = WeightSums.of(array)
        return cls(
            count=array.size,
            delta=float(array.sum()),
            absolute=float(np.abs(array).sum()),
            squared=float((array * array).sum()),
            k3=float(k3(array).sum()),
            largest=weights.log_largest,
            ratio=weights.total,
            ratio_squared=weights.squares,
        )

    def __add__(self, other: "DriftSums") -> "DriftSums":
        """The sums of both sets of tokens together."""
        if not (self.count and other.count):
            return self if self.count else other
        largest = max(self.largest, other.largest)
        mine, theirs = self._weights.at(largest), other._weights.at(largest)
        return DriftSums(
            self.count + other.count,
            self.delta + other.delta,
            self.absolute + other.absolute,
            self.squared + other.squared,
            self.k3 + other.k3,
            largest,
            mine.total + theirs.total,
            mine.squares + theirs.squares,
        )

    @property
    def mean(self) -> float:
        """Mean |Δ|."""
        return self._per_token(self.absolute)

    @property
    def signed_mean(self) -> float:
        """Mean Δ."""
        return self._per_token(self.delta)

    @property
    def rms(self) -> float:
        """√ mean Δ²."""
        return math.sqrt(self._per_token(self.squared))

    @property
    def mean_k3(self) -> float:
        """KL(behaviour || target) in nats per token."""
        return self._per_token(self.k3)

    @property
    def mean_ratio(self) -> float:
        """Mean ρ, 1 in expectation for every target if the tokens were sampled from the behaviour reported."""
        return self._per_token(self.ratio) * math.exp(self.largest)

    @property
    def ess(self) -> float:
        """Token ESS (Σρ)² / (n Σρ²), in (0, 1]."""
        self._check_any()
        return self._weights.ess

    @property
    def _weights(self) -> WeightSums:
        return WeightSums(self.count, self.largest, self.ratio, self.ratio_squared)

    def _per_token(self, total: float) -> float:
        self._check_any()
        return total / self.count

    def _check_any(self) -> None:
        if not self.count:
            raise InvalidValue("no tokens were added, so there is no mean; add a batch first")
