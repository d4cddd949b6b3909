"""The mismatch of one batch, counted once: by sequence, place in the sequence, and how likely the token was.

Rounding grows with rarity, so that a policy that sharpens has other gaps although nothing is wrong; cache faults grow
with position. Every other view (replica, environment, length) is a sum over sequences of what is counted here.

Tokens count by ψ = Δ within ±1 nat: one token of a mixture of experts may be 5 nats off in a healthy step.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.monitor.gaps import Difference
from zerodrift.monitor.intake import Reals
from zerodrift.stats.arrays import Floats, Ids

LOG_P = (-0.01, -0.1, -0.7, -2.3, -5.0)
"""Edges, from certain to rare: p = 0.99, 0.9, 0.5, 0.1, 0.007."""
POSITIONS = (0, 1, 16, 256, 2048)
"""First position of each part; the first token alone, since it alone comes out of the prefill."""
LOG_P_LABELS = ("p>0.99", "p>0.9", "p>0.5", "p>0.1", "p>0.007", "rarer")
POSITION_LABELS = ("first", "1-15", "16-255", "256-2047", "2048-")
MOST_NATS = 1.0
RARITIES = len(LOG_P) + 1
BLOCK = 2**17
"""Tokens counted at once."""


class Counted(NamedTuple):
    """[sequence, position, rarity] of one batch."""

    tokens: Floats
    ratio: Floats
    """Σ exp(ψ) - 1: 0 in expectation for any target, if the tokens were drawn from the behaviour that was reported.
    It stays there however sharp the policy becomes, so this baseline need not move."""
    size: Floats
    """Σ |ψ|."""
    squares: float
    """Σ k3(ψ) over the batch."""


def count(difference: Difference, counts: Ids) -> Counted:
    """`counts` are the tokens of each sequence, those that show no mismatch included."""
    ends = np.cumsum(counts)
    # Whole sequences, so many that their arrays stay in the processor's cache.
    firsts = np.flatnonzero(np.diff((ends - counts) // BLOCK, prepend=-1))
    parts = [
        _block(_tokens(difference, int(ends[first] - counts[first]), int(ends[last - 1])), counts[first:last])
        for first, last in zip(firsts, [*firsts[1:], len(counts)], strict=True)
    ]
    tokens, ratio, size = (np.concatenate([part[place] for part in parts]) for place in range(3))
    return Counted(tokens, ratio, size, math.fsum(part.squares for part in parts))


def _tokens(difference: Difference, begin: int, end: int) -> Difference:
    chosen = difference.chosen
    if chosen is None:
        return Difference(difference.delta[begin:end], difference.target[begin:end], None)
    before = int(np.count_nonzero(chosen[:begin]))
    after = before + int(np.count_nonzero(chosen[begin:end]))
    return Difference(difference.delta[before:after], difference.target[before:after], chosen[begin:end])


def _block(difference: Difference, counts: Ids) -> Counted:
    parts = np.diff(np.minimum(counts[:, None], (*POSITIONS, np.iinfo(np.int64).max)), axis=1)
    cells = parts.size * RARITIES
    place = np.repeat(np.arange(0, cells, RARITIES), parts.ravel())
    if difference.chosen is not None:
        place = place[difference.chosen]
    place += _rarity(difference)
    clipped = np.clip(difference.delta, -MOST_NATS, MOST_NATS)
    ratio = np.expm1(clipped)
    shape = (len(counts), len(POSITIONS), RARITIES)
    tokens, ratios, sizes = (
        np.bincount(place, weights=weights, minlength=cells).astype(np.float64).reshape(shape)
        for weights in (None, ratio, np.abs(clipped))
    )
    return Counted(tokens, ratios, sizes, _k3(clipped))


def _k3(clipped: Reals) -> float:
    """Σ k3, by ψ²/2 + ψ³/6 + ψ⁴/24: within 2 % at 1 nat, and without the difference of two sums that cancel."""
    wide = clipped.astype(np.float64)
    squares = wide * wide
    return float(squares.sum() / 2 + squares @ wide / 6 + squares @ squares / 24)


def _rarity(difference: Difference) -> NDArray[np.int8]:
    rarity = np.zeros(len(difference.target), dtype=np.int8)
    for edge in LOG_P:
        rarity += difference.target < edge
    return rarity
