"""One gap of one batch, in one pass: blocks of whole sequences that stay in the processor's cache.

Δ is the difference in the type that was given, so that float32 logprobs are subtracted in float32 (exact where the two are
within a factor of two of one another), and everything after that, each exponential and each sum, is float64.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerodrift.drift.summary import BLOCK, Block, BlockSums, DriftSummary, Workspace
from zerodrift.monitor.gaps import Difference, GapSums
from zerodrift.monitor.strata import Counted, count, joined, none_of
from zerodrift.stats.arrays import LARGEST_LOG_RATIO, Bools, Floats, Ids, Reals
from zerodrift.stats.ratios import WeightSums


class Part(NamedTuple):
    """Some sequences: the logprobs of their tokens that show the gap."""

    later: Reals
    earlier: Reals
    counts: Ids
    """Tokens of each sequence, all of them."""
    chosen: Bools | None


class GapMeasured(NamedTuple):
    """One gap, and its tokens by sequence, position and rarity where they were counted."""

    sums: GapSums
    counted: Counted | None


def parts(difference: Difference, counts: Ids) -> Iterator[Part]:
    """Whole sequences, about BLOCK tokens at a time."""
    later, earlier, chosen = difference
    ends = np.cumsum(counts)
    firsts = np.flatnonzero(np.diff((ends - counts) // BLOCK, prepend=-1))
    for first, last in zip(firsts, [*firsts[1:], len(counts)], strict=True):
        tokens = slice(int(ends[first] - counts[first]), int(ends[last - 1]))
        target, other, shown = later[tokens], earlier[tokens], None
        if chosen is not None:
            shown = chosen[tokens]
            target, other = target[shown], other[shown]
        yield Part(target, other, counts[first:last], shown)


def largest(difference: Difference, counts: Ids) -> float:
    """The greatest Δ."""
    return max(float((part.later - part.earlier).max(initial=-np.inf)) for part in parts(difference, counts))


def measure(
    difference: Difference | str, counts: Ids, epsilon: float, *, by_stratum: bool = False
) -> GapMeasured | None:
    """Everything that is summed of a gap; None where a ratio is beyond what any sampler can have drawn."""
    if isinstance(difference, str):
        return GapMeasured(GapSums(why=difference), None)
    low, high = np.log1p(-epsilon), np.log1p(epsilon)
    blocks: list[BlockSums] = []
    totals: list[Floats] = []
    strata: list[Counted] = []
    below = above = 0
    workspace = Workspace(_longest(counts))
    for part in parts(difference, counts):
        if not part.later.size:
            strata.append(none_of(part.counts))
            continue
        block = workspace.block(part.later, part.earlier)
        if block.top > LARGEST_LOG_RATIO:
            return None
        blocks.append(BlockSums.of(block))
        totals.append(_by_sequence(block, part))
        # Of a healthy engine no ratio is outside, which the ends of the block already say.
        below += int(np.count_nonzero(block.delta < low)) if block.bottom < low else 0
        above += int(np.count_nonzero(block.delta > high)) if block.top > high else 0
        if by_stratum:
            strata.append(count(block, part.later, part.counts, part.chosen))
    sums = GapSums(
        summary=DriftSummary.of_blocks(blocks),
        sequences=WeightSums.of(np.concatenate(totals)),
        below=below,
        above=above,
    )
    return GapMeasured(sums, joined(strata) if by_stratum else None)


def _longest(counts: Ids) -> int:
    """Tokens that a part can have: it begins within a block, and ends with its last sequence."""
    return min(int(counts.sum()), BLOCK + int(counts.max()))


def _by_sequence(block: Block, part: Part) -> Floats:
    """Σ Δ of each sequence that has a token in it."""
    counts = part.counts
    if part.chosen is not None:
        starts = np.cumsum(counts) - counts
        counts = np.add.reduceat(part.chosen, starts, dtype=np.int64)
        counts = counts[counts > 0]
    sums: Floats = np.add.reduceat(block.delta, np.cumsum(counts) - counts)
    return sums
