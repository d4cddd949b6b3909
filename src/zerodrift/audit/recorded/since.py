"""Since which step? Each step becomes one number, and bets on those numbers are evidence that holds while one reads on.

Numbers: the mean of |Δ| in gates over a step's tokens, each token clipped. The null is "on average at most one gate",
which is what healthy means. Samples: the martingale z of a step, whose mean is zero if tokens were drawn as claimed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.audit.measure import TokenTable
from zerodrift.audit.probes.parity import SAMPLING_ALPHA
from zerodrift.audit.recorded.timeline import Timeline
from zerodrift.stats.martingale import sampling_fidelity
from zerodrift.stats.onset import Onset
from zerodrift.stats.sequential import EProcess

Floats = NDArray[np.float64]

ALPHA = 1e-3
"""Chance of ever alarming on a healthy recording, at most; those sit at half a gate and never come near."""
CLIP = 20.0
"""Gates. A token counts for at most so much: one wild token in a thousand adds 0.02 gates to its step, and no single
step can raise the alarm (it multiplies E by at most 6.8)."""
SAMPLING_NULL = 0.1
"""Clipping at four standard deviations lifts the mean of a left-skewed z, by 0.03 at worst among near-certain tokens."""


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
    def says(self) -> str:
        """The answer in words."""
        if self.first is None:
            return f"no {self.unit} stands out (e = {e_value(self.log_e)})"
        known = "" if self.alarm else "probably "
        if self.began == 0:
            when = f"bad from the first recorded {self.unit} ({self.first}) on"
        else:
            when = f"{known}since {self.unit} {self.first}"
        if self.affected and self.affected[-1] < len(self.labels) - 1:
            when += f", last seen in {self.unit} {self.labels[self.affected[-1]]}"
        weak = "" if self.alarm else ", too little to be sure"
        return f"{when}; e = {e_value(self.log_e)} over {len(self.labels)} {self._blocks}{weak}"

    @property
    def _blocks(self) -> str:
        return "steps" if self.unit == "step" else "blocks of lines"


def e_value(log_e: float) -> str:
    """An e-value for people; it may be too large for a float."""
    return f"{math.exp(log_e):.3g}" if log_e < 700 else f"10^{log_e / math.log(10):.0f}"


def drift_since(table: TokenTable, order: Timeline, gate: float) -> Since:
    """When the numbers left the reference by more than the gate."""
    # A token that the parameters exclude is infinitely far off, and counts as the clip.
    sizes = order.means(np.minimum(np.abs(table.delta) / gate, CLIP), table.sequence)
    state = Onset(fresh=EProcess(clip=1.0, null_mean=2 / CLIP - 1))
    for size in sizes.tolist():
        # From [0, CLIP] to [-1, 1], as the e-process takes values that are bounded below.
        state = state.update(2 * size / CLIP - 1)
    began = state.began
    bad = tuple(place for place in np.flatnonzero(sizes > 1).tolist() if began is None or place >= began)
    return Since(order.unit, order.labels, sizes, began, state.log_peak, state.alarm(ALPHA), bad)


def sampling_since(table: TokenTable, order: Timeline, drawn: NDArray[np.bool_]) -> Since:
    """When the samples left the requested distribution; `drawn` marks tokens that were sampled and are possible."""
    scores = _scores(table, order, drawn)
    sharper, flatter = (Onset(fresh=EProcess(null_mean=SAMPLING_NULL)) for _ in range(2))
    places = [place for place, z in enumerate(scores) if z is not None]
    for place in places:
        z = scores[place]
        assert z is not None, "chosen above"
        sharper, flatter = sharper.update(z), flatter.update(-z)
    better = max(sharper, flatter, key=lambda state: state.log_peak)
    began = None if better.began is None else places[better.began]
    # Two bets, each with half the stake.
    log_e = max(0.0, better.log_peak - math.log(2))
    affected = tuple(range(began or 0, len(order.labels)))
    sizes = np.array([0.0 if z is None else z for z in scores])
    return Since(order.unit, order.labels, sizes, began, log_e, log_e >= -math.log(SAMPLING_ALPHA), affected)


def _scores(table: TokenTable, order: Timeline, drawn: NDArray[np.bool_]) -> Sequence[float | None]:
    """z of each step; None where too little was drawn for it to be Gaussian."""
    rows = np.flatnonzero(drawn)
    place = order.of_sequence[table.sequence[rows]]
    counts = np.bincount(place, minlength=len(order.labels))
    groups = np.split(rows[np.argsort(place, kind="stable")], np.cumsum(counts)[:-1])
    return [_score(table, group) for group in groups]


def _score(table: TokenTable, rows: NDArray[np.int64]) -> float | None:
    if not len(rows):
        return None
    logprobs = np.minimum(table.contracted[rows], 0.0)
    test = sampling_fidelity(logprobs, table.entropy[rows], table.variance[rows])
    return None if test.vacuous else test.z
