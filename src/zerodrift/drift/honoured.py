"""Is a parameter honoured as it was asked? Draws are bets on other values of it.

Who believes that the engine draws from r where p was asked for bets r(x) / p(x), which has mean 1 if p is right. What one
draw can win is limited, and the price is raised by what rounding may do to p: so a bet stays fair for every distribution
within ε of p in total variation. Winnings of several values are averaged (`stats.betting` says why that is enough).
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from zerodrift.stats.arrays import Floats
from zerodrift.stats.betting import log_mean_exp

LARGEST = 4.0
"""Most that one draw wins: four draws that the parameters exclude are worth 5.5 nats, and rounding makes one at most."""
KEPT_BACK = 1e-3
"""Share of the stake that is not bet, so that no single token ends a bet."""
MISSED = 0.05


class Value(NamedTuple):
    """A value that may be in force in place of the one asked for, over all draws."""

    value: float
    log_e: float
    expected: float
    """Of log_e, if this value is in force."""
    variance: float

    def seen(self, needed: float) -> bool:
        """Whether it would have been, 19 times in 20."""
        return self.expected + float(special.ndtri(MISSED)) * math.sqrt(self.variance) >= needed


class Honoured(NamedTuple):
    """What the draws say of one parameter."""

    name: str
    asked: float
    draws: int
    values: tuple[Value, ...]
    off: float = 0.0
    """Median distance of reported logprobs from the requested distribution's, beyond what rounding explains; in nats."""

    @property
    def log_e(self) -> float:
        """Log of the average over values."""
        return float(log_mean_exp(np.array([each.log_e for each in self.values])))

    def by_draws(self, level: float) -> bool:
        """Whether the draws are those that were asked for, as far as they say."""
        return self.log_e < -math.log(level)

    def right(self, level: float) -> bool:
        """Draws and numbers."""
        return self.by_draws(level) and not self.off

    def nearest_seen(self, level: float) -> Value | None:
        """The value nearest to the one asked for that would have been seen."""
        needed = -math.log(level) + math.log(len(self.values))
        seen = [each for each in self.values if each.seen(needed)]
        return min(seen, key=lambda each: each.expected, default=None)

    def message(self, level: float) -> str:
        """What is wrong."""
        if self.by_draws(level):
            return f"{self.name} {self.asked:g}: logprobs are those of another value, by {self.off:.2g} nats"
        likely = max(self.values, key=lambda each: each.log_e)
        return f"{self.name} is not honoured: asked for {self.asked:g}, drawn as with {likely.value:g}"


class Bets(NamedTuple):
    """One row: what each token wins, and what is expected. A axes: values; V: vocabulary."""

    log_e_AV: Floats
    expected_A: Floats
    variance_A: Floats


def bets(asked_V: Floats, others_AV: Floats, epsilon: float) -> Bets:
    """Probabilities asked for, and those of other values; `epsilon` is how far off, together, the former may be."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_AV = np.where(asked_V > 0, others_AV / asked_V, np.where(others_AV > 0, LARGEST, 0.0))
    ratio_AV = np.minimum(ratio_AV, LARGEST)
    price_A = (1 - epsilon) * (ratio_AV * asked_V).sum(axis=1) + epsilon * ratio_AV.max(axis=1)
    e_AV = KEPT_BACK + (1 - KEPT_BACK) * ratio_AV / np.maximum(price_A, 1e-12)[:, None]
    # What shares nothing with the distribution asked for has no price, and is not bet on.
    e_AV = np.where(price_A[:, None] < 1e-12, 1.0, e_AV)
    log_e_AV = np.log(e_AV)
    expected_A = (others_AV * log_e_AV).sum(axis=1)
    variance_A = (others_AV * log_e_AV**2).sum(axis=1) - expected_A**2
    return Bets(log_e_AV, expected_A, np.maximum(variance_A, 0.0))
