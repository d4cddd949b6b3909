"""Do numbers lie on a grid? Logits that were rounded to bf16 stand apart by multiples of its spacing, and logprobs,
which are logits less one number for each position, keep those distances to the last bit of fp32.
"""

from typing import NamedTuple

import numpy as np

from zerodrift.stats.arrays import Floats

SLACK = 0.1
"""Sizes are known to a tenth: near a power of two the finer of both spacings is taken, of which the other is a multiple."""
FP32_ROUNDING = 2.0**-22
"""Of a logprob between 1 and 2, in a sum that ends there: four units in the last place."""
COARSE = 50
"""A spacing is judged where it is so many times the rounding of what is reported; a number is then on it by chance in
4 of 100 at most."""


class OnGrid(NamedTuple):
    """How many distances were judged, how many are multiples of the spacing, and how many would be by chance."""

    judged: int
    on: int
    by_chance: float

    @property
    def share(self) -> float:
        """Of the distances, that lie on the grid."""
        return self.on / self.judged if self.judged else 0.0


def spacing(sizes: Floats, digits: int) -> Floats:
    """Distance between neighbours of numbers of these sizes, with so many binary digits behind the first."""
    smallest = np.maximum(np.abs(sizes) * (1 - SLACK), 2.0**-126)
    steps: Floats = np.exp2(np.floor(np.log2(smallest)) - digits)
    return steps


def distances_on_grid(first: Floats, second: Floats, logits: tuple[Floats, Floats], digits: int) -> OnGrid:
    """Reported logprobs of pairs of tokens, each pair of one position, and roughly the logits that they came from."""
    step = np.minimum(spacing(logits[0], digits), spacing(logits[1], digits))
    rounding = FP32_ROUNDING * np.maximum(np.maximum(np.abs(first), np.abs(second)), 1.0)
    coarse = step >= COARSE * rounding
    step, rounding, distance = step[coarse], rounding[coarse], (first - second)[coarse]
    off = np.abs(distance - np.round(distance / step) * step)
    return OnGrid(len(step), int((off <= rounding).sum()), float((2 * rounding / step).sum()))
