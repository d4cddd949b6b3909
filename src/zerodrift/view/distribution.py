"""How are signed differences counted, when they span eight decades and zero is the best of them?

Bins of equal width in log |Δ|, ten to the decade, to both sides of one bin in the middle that holds everything below
the smallest decade of interest. The axis counts bins from the middle: Δ sits at ±(½ + 10 log10(|Δ| / least)).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BINS_PER_DECADE = 10
LOWEST_DECADE = -9
"""Below a nano-nat even fp64 sums differ by their order."""


class Bins(NamedTuple):
    """Tokens along the signed logarithmic axis."""

    lowest_decade: int
    """|Δ| below 10 to this power is in the middle bin."""
    centres: list[int]
    counts: list[int]

    @property
    def least(self) -> float:
        """|Δ| below this is in the middle bin."""
        return float(10.0**self.lowest_decade)

    @property
    def reach(self) -> int:
        """How far from the middle the outermost tokens are, in bins."""
        return max(abs(centre) for centre, held in zip(self.centres, self.counts, strict=True) if held)

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Δ from and to, for every bin."""
        found = []
        for centre in self.centres:
            low, high = self._edge(abs(centre) - 1), self._edge(abs(centre))
            found.append((low, high) if centre > 0 else (-high, -low) if centre else (-high, high))
        return found

    def place(self, delta: float) -> float:
        """Where `delta` sits on the axis; everything below `least` sits in the middle."""
        if abs(delta) < self.least:
            return 0.0
        return float(np.sign(delta) * (0.5 + (np.log10(abs(delta)) - self.lowest_decade) * BINS_PER_DECADE))

    def _edge(self, steps: int) -> float:
        return float(10.0 ** (self.lowest_decade + steps / BINS_PER_DECADE))


def signed_log_bins(delta: Floats) -> Bins:
    """Whole decades to both sides: from below the first percentile of the sizes that are not 0 to the largest."""
    sizes = np.abs(delta)
    lowest, highest = _decades(sizes[sizes > 0])
    reach = (highest - lowest) * BINS_PER_DECADE
    far = sizes >= 10.0**lowest
    steps = np.zeros(delta.size, dtype=np.int64)
    # A value on an edge may round to the step below the first or beyond the last; it belongs to its neighbour.
    exact = (np.log10(sizes[far]) - lowest) * BINS_PER_DECADE
    steps[far] = np.clip(np.floor(exact).astype(np.int64) + 1, 1, reach)
    slots = np.sign(delta).astype(np.int64) * steps + reach
    return Bins(lowest, list(range(-reach, reach + 1)), np.bincount(slots, minlength=2 * reach + 1).tolist())


def _decades(sizes: Floats) -> tuple[int, int]:
    if not sizes.size:
        return LOWEST_DECADE, LOWEST_DECADE + 1
    lowest = max(LOWEST_DECADE, int(np.floor(np.log10(np.quantile(sizes, 0.01, method="lower")))))
    return lowest, max(lowest, int(np.floor(np.log10(sizes.max())))) + 1
