"""Since which step? Each step becomes one number, and bets on those numbers are evidence that holds while one reads on.

Numbers: the mean of |Δ| in gates over a step's tokens, each token clipped. The null is "on average at most one gate",
which is what healthy means. Samples: the martingale z of some tokens, whose mean is zero if they were drawn as claimed.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.drift.sampling import SAMPLING_ALPHA
from zerodrift.drift.strata import Timeline, group_means
from zerodrift.drift.tokens import TokenTable
from zerodrift.stats.arrays import Floats, Ids
from zerodrift.stats.onset import Onset
from zerodrift.stats.sequential import EProcess

ALPHA = 1e-3
"""Chance of ever alarming on a healthy recording, at most; those sit at half a gate and never come near."""
CLIP = 20.0
"""Gates. A token counts for at most so much: one wild token in a thousand adds 0.02 gates to its step, and no single
bet can raise the alarm (it multiplies E by at most 6.8)."""
PARTS = 4
"""Bets on each step, on as many consecutive parts of its rollouts: a step of 64 says more than one of two. A mean of
r gates multiplies E by at most r, so that steps at twice the gate would need twenty bets; one rollout alone cannot
alarm.
"""
LEAST_LOG_ODDS = math.log(20)
"""Less than 20 to 1 is no evidence for a step, whichever is the likeliest."""
MOST_LOG_ODDS = 9 * math.log(10)
"""A billion is read, and what is longer is counted."""
SAMPLING_VARIANCE = 20.0
"""Nats². Tokens are bet on in blocks of so much variance, about 15 tokens at 1.5 nats of entropy: small enough that a
bounded stake is the right stake, and cut where no outcome is known yet, so that no block is chosen by what it shows."""
SAMPLING_CLIP = 2.0
SAMPLING_NULL = 0.12
"""Clipping lifts the mean of a left-skewed z, the more the rarer the surprise: by 0.031 where one token in 300 is one,
0.054 at one in 1e5, 0.115 at one in 1e9, summed exactly over the tokens of a block."""


class Since(NamedTuple):
    """When it began, and how sure that is."""

    unit: str
    labels: tuple[int, ...]
    sizes: Floats
    """The number of each step that was bet on."""
    began: int | None
    """Place of the first bad step; None where nothing speaks for one."""
    log_e: float
    """Log of the e-value: how many times its stake the bet was worth when it was worth most."""
    alarm: bool
    affected: tuple[int, ...]
    """Places of the bad steps."""

    @property
    def first(self) -> int | None:
        """Number of the step, or of the line, since which it is bad."""
        return None if self.began is None else self.labels[self.began]

    @property
    def message(self) -> str:
        """The answer in words."""
        if self.first is None:
            return f"no {self.unit} stands out ({odds(self.log_e)})"
        if not self.alarm and self.log_e < LEAST_LOG_ODDS:
            return f"which {self.unit} it began with cannot be told ({odds(self.log_e)})"
        known = "" if self.alarm else "probably "
        if self.began == 0:
            when = f"bad from the first recorded {self.unit} ({self.first}) on"
        else:
            when = f"{known}since {self.unit} {self.first}"
        if self.affected and self.affected[-1] < len(self.labels) - 1:
            when += f", last seen in {self.unit} {self.labels[self.affected[-1]]}"
        weak = "" if self.alarm else ", too little to be sure"
        many = "" if len(self.labels) == 1 else "s"
        what = f"step{many}" if self.unit == "step" else f"block{many} of lines"
        return f"{when}; {odds(self.log_e)} over {len(self.labels)} {what}{weak}"


def odds(log_e: float) -> str:
    """An e-value for people, in three digits; it may be too large for a float."""
    if log_e >= MOST_LOG_ODDS:
        return f"odds 10^{log_e / math.log(10):.0f} : 1"
    return f"odds {float(f'{math.exp(log_e):.3g}'):,.10g} : 1"


def drift_since(table: TokenTable, order: Timeline, gate: float) -> Since:
    """When the numbers left the reference by more than the gate."""
    # A token that the parameters exclude is infinitely far off, and counts as the clip.
    per_token = np.minimum(np.abs(table.delta) / gate, CLIP)
    steps = len(order.labels)
    sizes = group_means(per_token, order.of_sequence[table.sequence], steps)
    parts = _parts(table, order)
    part_sizes = group_means(per_token, parts[table.sequence], PARTS * steps)
    state = Onset(fresh=EProcess(clip=1.0, null_mean=2 / CLIP - 1))
    openings: list[int] = []
    # A trainer need not have scored every step: only parts with tokens are bet on.
    for part in np.unique(parts[table.sequence]).tolist():
        opens = part // PARTS not in openings[-1:]
        openings += [part // PARTS] if opens else []
        # From [0, CLIP] to [-1, 1], as the e-process takes values that are bounded below.
        state = state.update(2 * float(part_sizes[part]) / CLIP - 1, opens=opens)
    began = None if state.began is None else openings[state.began]
    bad = tuple(step for step in np.flatnonzero(sizes > 1).tolist() if began is None or step >= began)
    return Since(order.unit, order.labels, sizes, began, state.log_peak, state.alarm(ALPHA), bad)


def _parts(table: TokenTable, order: Timeline) -> Ids:
    """Number of the part that each sequence belongs to: its step's times PARTS, and its place among the step's."""
    scored = np.unique(table.sequence)
    place = order.of_sequence[scored]
    counts = np.bincount(place, minlength=len(order.labels))
    by_step = np.argsort(place, kind="stable")
    rank = np.empty(len(scored), dtype=np.int64)
    rank[by_step] = np.arange(len(scored)) - np.repeat(np.cumsum(counts) - counts, counts)
    parts = np.zeros(len(order.of_sequence), dtype=np.int64)
    parts[scored] = PARTS * place + rank * np.minimum(PARTS, counts[place]) // counts[place]
    return parts


def sampling_since(table: TokenTable, order: Timeline, drawn: NDArray[np.bool_]) -> Since:
    """When the samples left the requested distribution; `drawn` marks tokens that were sampled and are possible."""
    blocks = _blocks(table, order, drawn)
    sharper, flatter = (Onset(fresh=EProcess(clip=SAMPLING_CLIP, null_mean=SAMPLING_NULL)) for _ in range(2))
    openings: list[int] = []
    for place, z in blocks:
        opens = not openings or place > openings[-1]
        openings += [place] if opens else []
        sharper, flatter = sharper.update(z, opens=opens), flatter.update(-z, opens=opens)
    better = max(sharper, flatter, key=lambda state: (state.log_peak, state.log_best))
    began = None if better.began is None else openings[better.began]
    # Two bets, each with half the stake.
    log_e = max(0.0, better.log_peak - math.log(2))
    sizes = np.zeros(len(order.labels))
    for place, z in blocks:
        sizes[place] += z
    affected = () if began is None else tuple(range(began, len(order.labels)))
    return Since(order.unit, order.labels, sizes, began, log_e, log_e >= -math.log(SAMPLING_ALPHA), affected)


def _blocks(table: TokenTable, order: Timeline, drawn: NDArray[np.bool_]) -> list[tuple[int, float]]:
    """The step in which each block begins, and its z; what is left at the end is too little for another."""
    rows = np.flatnonzero(drawn)
    rows = rows[np.argsort(order.of_sequence[table.sequence[rows]], kind="stable")]
    variance = table.variance[rows]
    # A token belongs to the block that was open before its own variance was added.
    block = ((np.cumsum(variance) - variance) // SAMPLING_VARIANCE).astype(np.int64)
    _, firsts, block = np.unique(block, return_index=True, return_inverse=True)
    surprise = np.minimum(table.contracted[rows], 0.0) + table.entropy[rows]
    # The last one is left out before it is divided by: of a sampler that is certain of every token it is nothing at all.
    sums, spread = (np.bincount(block, weights=each)[:-1] for each in (surprise, variance))
    places = order.of_sequence[table.sequence[rows[firsts]]][:-1]
    return list(zip(places.tolist(), (sums / np.sqrt(spread)).tolist(), strict=True))
