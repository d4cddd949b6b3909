"""What is kept of the drift of any number of tokens, over shards, workers and steps, in a fixed amount of memory.

A few sums are enough for every mean that is reported, and counts in bins of equal width in log |Δ| for quantiles: 20 to
the decade from 1e-9 to 100 nats, so that a quantile is off by a factor of at most 10^(1/40), **5.93 %**. Exact zeros have
a bin of their own, because bitwise equality is a claim and 1e-12 is not.

Summaries form a commutative monoid: `DriftSummary()` is that of no tokens, `+` that of the union of disjoint sets, exact
for counts and up to float64 rounding for sums.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats.arrays import LARGEST_LOG_RATIO, SMALLEST_LOG_RATIO, Floats, Ids, Reals, log_ratios
from zerodrift.stats.kl import k3
from zerodrift.stats.ratios import WeightSums

BINS_PER_DECADE: Final = 20
LOWEST_EXPONENT: Final = -9
HIGHEST_EXPONENT: Final = 2
RELATIVE_ERROR: Final = 10 ** (1 / (2 * BINS_PER_DECADE)) - 1

_BINS = BINS_PER_DECADE * (HIGHEST_EXPONENT - LOWEST_EXPONENT)
_EDGES = 10.0 ** (np.arange(_BINS + 1) / BINS_PER_DECADE + LOWEST_EXPONENT)
# Bin 0 holds zeros, bin 1 all below the first edge, the last one all from the last edge on.
_SLOTS = _BINS + 3


BLOCK: Final = 2**16
"""Tokens that are summed at once: half a megabyte of each array stays in the processor's cache."""


def _fits(delta: npt.ArrayLike) -> bool:
    """Log ratios as they should be, in one dimension of floats: the common case, which is not copied to be checked."""
    if not (isinstance(delta, np.ndarray) and delta.ndim == 1 and delta.size and delta.dtype.kind == "f"):
        return False
    # NaN is neither.
    return bool(delta.min() >= SMALLEST_LOG_RATIO and delta.max() <= LARGEST_LOG_RATIO)


class Block(NamedTuple):
    """Δ of some tokens, with what more than one sum is taken of, and memory to work in."""

    delta: Floats
    size: Floats
    """|Δ|."""
    excess: Floats
    """exp(Δ) - 1."""
    top: float
    """Greatest Δ."""
    bottom: float
    spare: Floats
    narrow: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
    whole: Ids


class Workspace:
    """Memory for one block after another. Fresh arrays of half a megabyte each are given back to the system and asked for
    again at every block, and cost three times what is computed in them."""

    def __init__(self, most: int) -> None:
        """Of blocks of at most so many tokens."""
        self._floats = np.empty((4, most))
        self._narrow = np.empty((2, most), dtype=np.float32)
        self._whole = np.empty(most, dtype=np.int64)

    def block(self, later: Reals, earlier: Reals | float = 0.0) -> Block:
        """The tokens of one block, until the next is asked for; sums of it are for a `top` up to LARGEST_LOG_RATIO.

        Two float32 are subtracted in float32, which is exact while they are within a factor of two.
        """
        count = len(later)
        delta, size, excess, spare = (row[:count] for row in self._floats)
        np.subtract(later, earlier, out=delta)
        np.abs(delta, out=size)
        with np.errstate(over="ignore"):
            np.expm1(delta, out=excess)
        first, second = (row[:count] for row in self._narrow)
        ends = float(delta.max()), float(delta.min())
        return Block(delta, size, excess, *ends, spare, (first, second), self._whole[:count])


class BlockSums(NamedTuple):
    """What a summary is made of, of one block."""

    delta: float
    absolute: float
    squared: float
    k3: float
    weights: WeightSums
    max: float
    bins: Ids

    @classmethod
    def of(cls, block: Block) -> "BlockSums":
        """All sums in float64, whatever Δ was computed in."""
        delta, absolute = float(block.delta.sum()), float(block.size.sum())
        squared = float(block.delta @ block.delta)
        k3_sum, weights = _k3_and_weights(block, delta, absolute, squared)
        largest = max(block.top, -block.bottom)
        return cls(delta, absolute, squared, k3_sum, weights, largest, _counts(block))


def _counts(block: Block) -> Ids:
    """|Δ| by bin: a logarithm in fp32, and a search among the edges for the few that lie close to one."""
    size, (place, floor), slots = block.size, block.narrow, block.whole
    with np.errstate(divide="ignore", under="ignore"):
        np.copyto(place, size, casting="same_kind")
        np.log10(place, out=place)
    # A decade to either side has no bins of its own, and zeros fall into the lower one.
    np.clip(place, LOWEST_EXPONENT - 1, HIGHEST_EXPONENT + 1, out=place)
    place -= LOWEST_EXPONENT - 1
    place *= BINS_PER_DECADE
    np.floor(place, out=floor)
    place -= floor
    place -= np.float32(0.5)
    # By way of 32 bits: from a float straight to 64, it takes twice as long.
    np.copyto(slots, floor.astype(np.int32))
    # fp32 has the place to 1e-4.
    close = np.flatnonzero(np.abs(place, out=place) > 0.499)
    slots[close] = np.searchsorted(_EDGES, size[close], side="right") - 1 + BINS_PER_DECADE
    counts = np.zeros(_BINS + 2 * BINS_PER_DECADE + 1, dtype=np.int64)
    np.add.at(counts, slots, 1)
    last = BINS_PER_DECADE + _BINS
    below, beyond = int(counts[:BINS_PER_DECADE].sum()), int(counts[last:].sum())
    zeros = size.size - int(np.count_nonzero(size)) if below else 0
    return np.concatenate(([zeros, below - zeros], counts[BINS_PER_DECADE:last], [beyond]))


def _k3_and_weights(block: Block, delta: float, absolute: float, squared: float) -> tuple[float, WeightSums]:
    """Σ k3 and the sums of ρ, both out of one exponential where that costs no digit.

    expm1(Δ) - Δ is off by 1e-16 |Δ| and k3 is about Δ²/2, so that the sum has 12 digits from a |Δ| of 0.002 on; ρ = 1 +
    expm1(Δ) has all of them while it is near 1.
    """
    array, excess, top = block.delta, block.excess, block.top
    if absolute > 1e3 * squared or top > 5 or block.bottom < -5:
        return float(k3(array).sum()), WeightSums.of(array)
    total, squares = float(excess.sum()), float(excess @ excess)
    sums = WeightSums(array.size, 0.0, array.size + total, array.size + 2 * total + squares).at(top)
    # One weight is 1, and the last bit of a product may not know.
    sums = sums._replace(total=max(1.0, sums.total), squares=max(1.0, sums.squares))
    return total - delta, sums


class DriftSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums over tokens of Δ = log target - log behaviour, of its KL estimate and of ρ = exp(Δ); counts of |Δ|."""

    count: int = 0
    delta: float = 0.0
    absolute: float = 0.0
    squared: float = 0.0
    k3_sum: float = 0.0
    top: float = 0.0
    """Greatest Δ, 0 of no tokens: the two sums below are relative to it, since below -372 nats ρ² is no float."""
    ratio: float = 0.0
    ratio_squared: float = 0.0
    max: float = 0.0
    """Greatest |Δ|."""
    bins: tuple[int, ...] = (0,) * _SLOTS

    def __post_init__(self) -> None:
        """A summary read back from a file or from another rank is refused like any other number."""
        require.whole(InvalidValue, "count", self.count, "it counts tokens", 0)
        least = {"delta": -math.inf, "top": -math.inf}
        if self.count:
            least |= {"ratio": 1.0, "ratio_squared": 1.0}
        for name in DriftSummary.__struct_fields__[1:-1]:
            rule = "it is taken over tokens"
            require.real(NonFinite, name, getattr(self, name), rule, least.get(name, 0.0))
        if len(self.bins) != _SLOTS or min(self.bins) < 0 or sum(self.bins) != self.count:
            raise InvalidValue(
                f"{len(self.bins)} bins that count {sum(self.bins)} tokens were read, where {_SLOTS} count {self.count}: "
                "summarise the tokens again"
            )

    @classmethod
    def of(cls, delta: npt.ArrayLike) -> "DriftSummary":
        """The summary of one batch of tokens."""
        array = np.asarray(delta) if _fits(delta) else log_ratios(delta)
        blocks = (array[begin : begin + BLOCK] for begin in range(0, array.size, BLOCK))
        workspace = Workspace(min(array.size, BLOCK))
        return cls.of_blocks([BlockSums.of(workspace.block(block)) for block in blocks])

    @classmethod
    def of_blocks(cls, blocks: Sequence[BlockSums]) -> "DriftSummary":
        """All of them together; one at least."""
        top = max(block.weights.log_largest for block in blocks)
        weights = [block.weights.at(top) for block in blocks]
        return cls(
            count=sum(block.size for block in weights),
            delta=math.fsum(block.delta for block in blocks),
            absolute=math.fsum(block.absolute for block in blocks),
            squared=math.fsum(block.squared for block in blocks),
            k3_sum=math.fsum(block.k3 for block in blocks),
            top=top,
            ratio=math.fsum(block.total for block in weights),
            ratio_squared=math.fsum(block.squares for block in weights),
            max=max(block.max for block in blocks),
            bins=tuple(np.sum([block.bins for block in blocks], axis=0).tolist()),
        )

    def __add__(self, other: "DriftSummary") -> "DriftSummary":
        """Both sets of tokens together."""
        if not (self.count and other.count):
            return self if self.count else other
        top = max(self.top, other.top)
        mine, theirs = self._weights.at(top), other._weights.at(top)
        return DriftSummary(
            count=self.count + other.count,
            delta=self.delta + other.delta,
            absolute=self.absolute + other.absolute,
            squared=self.squared + other.squared,
            k3_sum=self.k3_sum + other.k3_sum,
            top=top,
            ratio=mine.total + theirs.total,
            ratio_squared=mine.squares + theirs.squares,
            max=max(self.max, other.max),
            bins=tuple(a + b for a, b in zip(self.bins, other.bins, strict=True)),
        )

    @property
    def mean(self) -> float:
        """Mean |Δ|: what gates read."""
        return self._per_token(self.absolute)

    @property
    def signed_mean(self) -> float:
        """Mean Δ: a bias, where `mean` is a distance."""
        return self._per_token(self.delta)

    @property
    def k1(self) -> float:
        """KL(behaviour || target) in nats per token, by -Δ: unbiased, of the most variance."""
        return -self.signed_mean

    @property
    def k2(self) -> float:
        """The same by Δ²/2: never negative, biased in third order."""
        return self._per_token(self.squared) / 2

    @property
    def k3(self) -> float:
        """The same by exp(Δ) - 1 - Δ: unbiased and never negative; what frameworks call the KL penalty."""
        return self._per_token(self.k3_sum)

    @property
    def mean_ratio(self) -> float:
        """Mean ρ, 1 in expectation for every target if the tokens were sampled from the behaviour reported."""
        return self._per_token(self.ratio) * math.exp(self.top)

    @property
    def ess(self) -> float:
        """Token ESS (Σρ)² / (n Σρ²), in (0, 1]."""
        self._check_any()
        return self._weights.ess

    @property
    def zeros(self) -> int:
        """Tokens on which both sides agree to the last bit."""
        return self.bins[0]

    def quantile(self, q: float) -> float:
        """Order statistic number ⌈q·n⌉ of |Δ|, within RELATIVE_ERROR; q is the decimal number that it prints as.

        Below 1e-9 the answer is 1e-9 and from 100 on it is `max`: upper bounds, since no edge lies beyond. None is above `max`.
        """
        require.real(InvalidValue, "q", q, "a quantile lies in [0, 1]", 0, 1)
        self._check_any()
        # As it is written, 0.07 of 100 tokens is 7; the product of the two floats is a hair more.
        rank = max(1, math.ceil(Fraction(str(q)) * self.count))
        slot = int(np.searchsorted(np.cumsum(self.bins), rank))
        if slot < 2:
            return min(self.max, float(_EDGES[0])) if slot else 0.0
        if slot == _SLOTS - 1:
            return self.max
        # The middle of the bin in which the greatest lies may be beyond it.
        return min(self.max, float(np.sqrt(_EDGES[slot - 2] * _EDGES[slot - 1])))

    @property
    def _weights(self) -> WeightSums:
        return WeightSums(self.count, self.top, self.ratio, self.ratio_squared)

    def _per_token(self, total: float) -> float:
        self._check_any()
        return total / self.count

    def _check_any(self) -> None:
        if not self.count:
            raise InvalidValue("no tokens were added, so there is no mean and no quantile; add a batch first")
