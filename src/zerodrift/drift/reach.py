"""How long may a sequence become before Δ leaves the floor? The largest stable context, found in what was measured.

Tokens stand in the order of their positions, and are off where their |Δ| is more than a healthy token's ever was. Of all
places to cut that order in two, the one under which the two shares of tokens that are off are likeliest is taken; that
search is one pass over cumulative counts.
"""

from typing import NamedTuple

import numpy as np

from zerodrift.drift.gates import Gates
from zerodrift.drift.split import cut_gains
from zerodrift.drift.tokens import TokenTable
from zerodrift.stats.arrays import Bools, Floats, Ids

LEAST_BEFORE = 24
"""Tokens that must be right before a length is called stable."""
MOST_OFF = 0.01
"""Share of tokens before it that may be off: rounding has tails."""
LEAST_GAIN = 8.0
"""Nats over no cut at all, a sequence counted once, because sequences may be off as a whole for other reasons. Of 600 tables
in which one in ten or three in ten sequences of 24 tokens were, none gained more than 4.7."""


class Reach(NamedTuple):
    """How far Δ stays where it should."""

    tokens: int
    """Length of prompt and output up to which every number may be used."""
    asked: int
    """The longest that was asked."""

    @property
    def whole(self) -> bool:
        """Nothing that was asked is too long."""
        return self.tokens == self.asked

    @property
    def message(self) -> str:
        """In words."""
        if self.whole:
            return f"stable to the end of what was asked ({self.asked:,} tokens)"
        return f"stable up to {self.tokens:,} tokens of prompt and output, of {self.asked:,} that were asked, and wrong beyond"


def stable_context(table: TokenTable, gates: Gates) -> Reach | None:
    """The largest stable context; None where Δ does not depend on it: wrong from the start, or here and there."""
    if not len(table.position):
        return None
    possible = np.isfinite(table.contracted)
    size = np.where(possible, np.abs(np.where(possible, table.delta, 0.0)), np.inf)
    order, asked = np.argsort(table.position, kind="stable"), int(table.position.max()) + 1
    size, positions = size[order], table.position[order]
    least = LEAST_GAIN * len(positions) / len(np.unique(table.sequence))
    cut = _likeliest_cut(size > gates.outlier, positions, least)
    if cut >= LEAST_BEFORE and _stays(size[:cut], gates) and size[cut:].mean() > gates.mean:
        # A token at position p ends a sequence of p + 1.
        return Reach(int(positions[cut - 1]) + 1, asked)
    return Reach(asked, asked) if _stays(size, gates) else None


def _stays(size: Floats, gates: Gates) -> bool:
    return bool(size.mean() <= gates.mean and (size > gates.outlier).mean() <= MOST_OFF)


def _likeliest_cut(off: Bools, positions: Ids, least: float) -> int:
    """How many tokens come before the change; 0 where there is none, or tokens are off less after it."""
    total, count = len(off), float(off.sum())
    # Tokens at one position are on one side.
    places = np.flatnonzero(np.diff(positions)) + 1
    if not len(places):
        return 0
    below = np.cumsum(off)[places - 1].astype(np.float64)
    above = count - below
    before = places.astype(np.float64)
    gain = cut_gains(below, before, count, total)
    rising = below / before < above / (total - before)
    gain = np.where(rising, gain, -np.inf)
    best = int(gain.argmax())
    return int(places[best]) if gain[best] >= least else 0
