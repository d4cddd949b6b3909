"""How much of a predicted change was observed, with bounds that hold for any number of canary tokens. Torch-free.

The unit is a canary sequence, since tokens of one share their rounding. For sequence c, with p the predicted and o the
observed changes of its logprobs, the error of slope b is

    X_c = Σ w p (o − b p),   and   T(b) = Σ X_c / √Σ X_c²,

with weights w that only the trainer's numbers decide, lest a few tokens that an update moves much be all witnesses. At the true slope the errors are those of two roundings of one engine, under the old weights and under the new ones.
Exchanging the two turns the sign of X_c, so signs are fair coins given all else, and Hoeffding's inequality gives

    P(T ≥ t) ≤ exp(−t²/2)

without a variance, a distribution or a large number (Efron 1969). A slope is refused where |T| exceeds t. Noise may have
any tails; what is assumed is that sequences err independently, and that an update does not change how an engine errs.
"""

import math
from typing import NamedTuple

import numpy as np

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, Ids, finite

FALSE_ALARM = 1e-4
"""Chance that a receipt says MISSED of an update that arrived, at most, over all that it tests."""
LOUD = 3.0
"""Median changes from which on a token's say does not grow: on random ids one in 80 sequences had half of it otherwise."""
SEEN = 1.96
"""Standard errors within which an estimate lies 19 times in 20."""


def critical(tests: int, level: float = FALSE_ALARM) -> float:
    """What each of `tests` one-sided statistics may reach, so that any of them exceeds it with `level` at most."""
    return math.sqrt(2 * math.log(tests / level))


class SlopeFit(NamedTuple):
    """Observed on predicted change: 1 where an update arrived, 0 where it did not."""

    by_sequence: tuple[Floats, Floats]
    """Σ w p o and Σ w p² of each sequence: all that a slope is made of."""
    tokens: int
    limit: float
    """That |T| may not exceed."""

    @property
    def moves(self) -> bool:
        """Whether anything was predicted to change."""
        return bool(self.by_sequence[1].sum() > 0)

    @property
    def estimate(self) -> float:
        """Σ w p o / Σ w p²."""
        products, squares = self.by_sequence
        return float(products.sum() / squares.sum()) if self.moves else 0.0

    @property
    def effective(self) -> float:
        """How many sequences of equal weight say as much; at or below `limit`² nothing can be refused."""
        _, squares = self.by_sequence
        return float(squares.sum() ** 2 / (squares**2).sum()) if self.moves else 0.0

    def statistic(self, slope: float) -> float:
        """T: how far what was observed lies above `slope`."""
        products, squares = self.by_sequence
        errors = products - slope * squares
        size = math.sqrt(float((errors**2).sum()))
        # Errors of a few units in the last place are none: an engine with the trainer's very bits has them.
        noise = 1e-12 * math.sqrt(float((products**2).sum() + (squares**2).sum()))
        return float(errors.sum()) / size if size > noise else 0.0

    def refuses(self, slope: float) -> bool:
        """Whether this slope is out of the question."""
        return abs(self.statistic(slope)) > self.limit

    @property
    def interval(self) -> tuple[float, float]:
        """Slopes that are not refused: those between the roots of (ΣX)² = t² ΣX²; all, where sequences are too few."""
        products, squares = self.by_sequence
        t2 = self.limit**2
        leading = squares.sum() ** 2 - t2 * (squares**2).sum()
        if leading <= 0 or not self.moves:
            return -math.inf, math.inf
        middle = products.sum() * squares.sum() - t2 * (products * squares).sum()
        last = products.sum() ** 2 - t2 * (products**2).sum()
        root = math.sqrt(max(0.0, float(middle**2 - leading * last)))
        return float((middle - root) / leading), float((middle + root) / leading)

    def tokens_for(self, resolution: float) -> int | None:
        """How many tokens of this kind would tell slopes apart by `resolution`, 19 times in 20; None: no number would."""
        if not self.moves:
            return None
        products, squares = self.by_sequence
        left = products - self.estimate * squares
        error = math.sqrt(float((left**2).sum())) / float(squares.sum())
        by_noise = ((self.limit + SEEN) * error / resolution) ** 2
        # With a tenth more than the number below which nothing can be refused: sequences differ.
        by_number = 1.1 * self.limit**2 / self.effective
        per_sequence = self.tokens / len(squares)
        return math.ceil(max(by_noise, by_number) * len(squares)) * math.ceil(per_sequence)


def fit_slope(predicted: Floats, observed: Floats, sequence: Ids, limit: float) -> SlopeFit:
    """Of tokens that belong to these sequences, numbered from 0."""
    p, o = finite("predicted", predicted), finite("observed", observed)
    if not p.shape == o.shape == sequence.shape or p.ndim != 1:
        raise InvalidValue(
            f"{p.shape} predicted, {o.shape} observed changes and {sequence.shape} sequences; give one of each a token"
        )
    say = token_weights(p) * p
    products: Floats = np.bincount(sequence, weights=say * o).astype(np.float64)
    squares: Floats = np.bincount(sequence, weights=say * p).astype(np.float64)
    return SlopeFit((products, squares), len(p), limit)


def token_weights(predicted: Floats) -> Floats:
    """1 / (p² + s²), with s of some median changes: about equal for tokens that are moved little, and less for others."""
    moved = np.abs(predicted[predicted != 0])
    usual = LOUD * float(np.median(moved)) if len(moved) else 1.0
    weights: Floats = 1 / (predicted**2 + usual**2)
    return weights


def excess(sizes: Floats, usual: Floats, sequence: Ids) -> float:
    """T of |errors| now against those before: as likely up as down, sequence by sequence, where nothing has changed."""
    more = np.bincount(sequence, weights=sizes - usual)
    size = math.sqrt(float((more**2).sum()))
    return float(more.sum()) / size if size else 0.0
