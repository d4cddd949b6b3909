"""How is drift added up over shards, workers and steps without keeping the tokens?

Seven sums are enough for every mean that is reported. They form a commutative monoid: `DriftSums()` is the empty
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


class DriftSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over tokens of Δ = log target - log behaviour, of its KL estimate, and of ρ = exp(Δ)."""

    count: int = 0
    delta: float = 0.0
    absolute: float = 0.0
    squared: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0

    def __post_init__(self) -> None:
        """Sums read back from a file are refused like any other number."""
        require.whole(InvalidValue, "count", self.count, "it counts tokens", 0)
        for name in ("delta", "absolute", "squared", "k3", "ratio", "ratio_squared"):
            low = -math.inf if name == "delta" else 0.0
            require.real(NonFinite, f"sum of {name}", getattr(self, name), "it is a sum over tokens", low)

    @classmethod
    def of(cls, delta: npt.ArrayLike) -> "DriftSums":
        """The sums of one batch of tokens."""
        array = log_ratios(delta)
        ratio = np.exp(array)
        return cls(
            count=array.size,
            delta=float(array.sum()),
            absolute=float(np.abs(array).sum()),
            squared=float((array * array).sum()),
            k3=float(k3(array).sum()),
            ratio=float(ratio.sum()),
            ratio_squared=float((ratio * ratio).sum()),
        )

    def __add__(self, other: "DriftSums") -> "DriftSums":
        """The sums of both sets of tokens together."""
        return DriftSums(
            *(getattr(self, name) + getattr(other, name) for name in DriftSums.__struct_fields__),
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
        return self._per_token(self.ratio)

    @property
    def ess(self) -> float:
        """Token ESS (Σρ)² / (n Σρ²), in (0, 1]."""
        mean_ratio = self.mean_ratio
        if self.ratio_squared == 0:
            raise NonFinite(
                f"the ratios of all {self.count} tokens vanish (Δ below -372 nats); ESS has no value: "
                "one of the two logprobs does not belong to the sampled tokens"
            )
        # At most 1 by Cauchy-Schwarz, but for the last bit of two rounded sums.
        return min(1.0, mean_ratio * (self.ratio / self.ratio_squared))

    def _per_token(self, total: float) -> float:
        if not self.count:
            raise InvalidValue("no tokens were added, so there is no mean; add a batch first")
        return total / self.count
