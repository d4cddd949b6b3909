"""Did some set of outcomes come as often as it was due? Bets at fair odds, whose winnings are evidence.

A draw falls into a set with probability q_i, known before it is made. Whoever believes that the set's odds are r times
as high bets

    e_i(r) = r^[it fell into the set] / (1 - q_i + r q_i)

which has mean 1 if q_i is right, whatever happened before. So does the product over draws, and so does any average of
products over factors r and over sets: P(E >= 1/α) <= α without any further correction (Ville). r = 0 bets that the set
is never drawn, r = ∞ that nothing else is.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, Ids

FACTORS = (0.0, 1 / 8, 1 / 4, 1 / 2, 0.7, 0.85, 0.95, 1.05, 1.2, 1.4, 2.0, 4.0, 16.0, math.inf)
"""Bet on side by side; not knowing which is right costs log 14 = 2.6 nats. 16 is the most that one draw can win, so no
single rare token raises an alarm."""
_FINITE = np.array(FACTORS[:-1])
_LOGS = np.log(_FINITE, where=_FINITE > 0, out=np.zeros(len(_FINITE)))
LEAST, MOST = 1e-12, 1 - 1e-6
"""Masses are sums in fp32: 0 and 1 among them are roundings, and would win or lose everything at once."""


class Counts(NamedTuple):
    """How often each of some sets came, and what bets on it would have paid. One entry per set."""

    drawn: Ids
    due: Floats
    """Σ q."""
    draws: Ids
    """Of those that could have fallen into the set."""
    costs: Floats
    """[set, finite factor]: Σ log(1 - q + r q)."""
    always: Floats
    """-Σ log q: what the bet on nothing else pays, if it pays."""

    def log_e(self, drawn: npt.ArrayLike | None = None) -> Floats:
        """Log of the average over factors, with the counts as they are, or as they might have been."""
        counts = np.asarray(self.drawn if drawn is None else drawn, dtype=np.float64)
        # A bet on never is lost by the first draw, and not before.
        paid = counts[:, None] * _LOGS - self.costs
        paid[:, 0] = np.where(counts == 0, -self.costs[:, 0], -math.inf)
        last = np.where(counts >= self.draws, self.always, -math.inf)
        return log_mean_exp(np.concatenate([paid, last[:, None]], axis=1))


def count(member: npt.NDArray[np.bool_], mass: npt.NDArray[np.floating]) -> Counts:
    """`member[i, s]` says whether draw i fell into set s, `mass[i, s]` how likely that was."""
    if member.shape != mass.shape or member.ndim != 2:
        raise InvalidValue(
            f"members {member.shape} and masses {mass.shape}; give one of each per draw and set"
        )
    if mass.size and not (mass.min() >= 0 and mass.max() <= 1 + 1e-4):
        raise InvalidValue(f"masses reach from {mass.min()} to {mass.max()}; they are probabilities")
    q = np.clip(mass.astype(np.float64), 0.0, MOST)
    possible = q > LEAST
    costs = np.stack([np.log1p((factor - 1) * q).sum(axis=0) for factor in _FINITE], axis=1)
    return Counts(
        drawn=(member & possible).sum(axis=0),
        due=q.sum(axis=0),
        draws=possible.sum(axis=0),
        costs=costs,
        always=-np.log(np.where(possible, q, 1.0)).sum(axis=0),
    )


def log_mean_exp(logs: Floats) -> Floats:
    """Log of the mean of exp over the last axis, where some may be -inf."""
    top = logs.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        result: Floats = top[..., 0] + np.log(np.exp(logs - top).mean(axis=-1))
    return result
