"""Does a stop token come as often as it is due, where it is due often?

Outputs of an audit end once or twice in a thousand tokens, which shows nothing. Prefixes are asked instead after which an
end is likely, one token each: every draw is a bet on its own (`stats.betting`), with odds that are moved in the engine's
favour by as much as rounding may move them.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.drift.power import SHARES, most_drawn
from zerodrift.records.evidence import Power
from zerodrift.stats.arrays import Floats
from zerodrift.stats.betting import FACTORS, Counts, count

MOST_DRAWS = 1024
"""Of one token each: 3 s of vLLM on two cores, with a model of 135 million parameters."""
PREFIXES = 4
HALF = 0.5
"""What is to be seen: a stop token with half of its odds."""


class Ends(NamedTuple):
    """Draws after likely ends, counted."""

    drawn: int
    due: float
    draws: int
    log_e: float
    power: Power

    @property
    def p_value(self) -> float:
        """1/E."""
        return min(1.0, math.exp(-self.log_e))


def informative(masses: Floats) -> Floats:
    """Nats that one draw is expected to win against half of the odds, for each mass of the stop tokens."""
    q = np.clip(masses, 1e-9, 1 - 1e-9)
    return np.asarray(_halved(q) * math.log(HALF) - np.log1p((HALF - 1) * q), dtype=np.float64)


def draws_needed(masses: Floats, band: float, level: float) -> int | None:
    """Draws of each prefix, about the fewest that see half of the odds; None where even MOST_DRAWS do not."""
    each = 32
    while each * len(masses) <= MOST_DRAWS:
        q = np.repeat(masses, each)
        if (seen := _power(q, band, level).seen_from) is not None and seen >= HALF:
            return each
        each += 32
    return None


def count_ends(masses: Floats, stopped: NDArray[np.bool_], band: float, level: float) -> Ends:
    """One of each per draw: how likely an end was, and whether it came; `band` is how far off a logit may be."""
    counts = _counts(masses, band, stopped)
    return Ends(
        drawn=int(stopped.sum()),
        due=float(masses.sum()),
        draws=len(masses),
        log_e=float(counts.log_e()[0]),
        power=_power(masses, band, level),
    )


def _power(masses: Floats, band: float, level: float) -> Power:
    counts = _counts(masses, band, np.zeros(len(masses), dtype=np.bool_))
    due = float(masses.sum())
    for factor in SHARES[::-1] - SHARES[0]:
        odds = factor * masses / (1 - masses + factor * masses)
        if float(counts.log_e([most_drawn(odds)])[0]) >= -math.log(level):
            said = f"from {factor:.2f} times the odds" if factor else "if it never comes"
            message = f"stop token too rare: {said} ({due:.0f} were due)"
            return Power(name="stop token too rare", message=message, seen_from=float(factor))
    return Power(
        name="stop token too rare", message=f"stop token too rare: would not be seen ({due:.1f} were due)"
    )


def _counts(masses: Floats, band: float, stopped: NDArray[np.bool_]) -> Counts:
    """Bets on too few are priced as if fewer were due, and bets on too many as if more were."""
    low, high = (count(stopped[:, None], _moved(masses, by)[:, None]) for by in (-band, band))
    fewer = np.array(FACTORS[:-1]) < 1
    return low._replace(costs=np.where(fewer, low.costs, high.costs), always=high.always)


def _moved(masses: Floats, by: float) -> Floats:
    moved: Floats = masses * math.exp(by) / (1 - masses + masses * math.exp(by))
    return moved


def _halved(q: Floats) -> Floats:
    halved: Floats = HALF * q / (1 - q + HALF * q)
    return halved
