"""A hypothesis about single tokens: some carry a constant bias in the engine.

A bias b on a set of ids moves the logprob of a token by

    b · [the token is one of them] − log(1 + P (e^b − 1)),   P = their mass before

so that the biased ones are off to one side and all others to the other, by what the normaliser makes of the mass: few ids,
or rare ones, leave most numbers at the floor. Every token says which b it would take, by its own number and P; ids are
taken one at a time, by what they say as sampled tokens or as mass, and each has to pay for itself.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis
from zerodrift.stats.arrays import Bools, Floats, Ids

MOST_TOKENS = 20
CANDIDATES = 8
"""Ids that are tried next, of each of four ways to see one: off to either side, by their own numbers or by their mass."""
PRICE = 4.0
"""Nats for an id beside those of choosing it: its logarithm among all."""
LEAST_GAIN = 0.5
"""Share that the ids must take away of the cost of tokens that are off: a handful of ids fits a little of anything."""
OFF = 4.0
"""σ, beyond which a token is."""
AROUND = 0.2
"""Relative distance within which the size is refined."""
WILD = 1.0
"""Nats of what is left: a token that is further off counts as this far in looking for masses."""
MOST_BIAS = 20.0
"""Of a word that is banned: e⁻²⁰ is nothing."""
Cost = Callable[[Explanation], float]


class SeenTokens(NamedTuple):
    """Tokens, what is left of their numbers, and what they might have been."""

    residual: Floats
    """Reported minus predicted; NaN where nothing is predicted."""
    sigma: Floats
    tokens: Ids
    masses: NDArray[np.float32]
    """[token, id]: of the distribution that was asked for."""

    @property
    def known(self) -> "SeenTokens":
        """Those of which something is predicted."""
        there = np.isfinite(self.residual)
        return SeenTokens(self.residual[there], self.sigma[there], self.tokens[there], self.masses[there])


def bias_hypotheses(
    explanation: Explanation, seen: SeenTokens, temperature: float, cost: Cost
) -> Iterator[Hypothesis]:
    """The ids that the numbers ask for, with the bias that fits best."""
    if explanation.bias:
        return
    seen = seen.known
    fit = _pursued(seen)
    if not fit.ids or not _explains(seen, fit):
        return
    size = _refined(explanation, fit, temperature, cost)
    shown = ", ".join(str(token) for token in fit.ids[:5])
    many = "s" * (len(fit.ids) > 1)
    message = (
        f"a bias of {size:+.3g} on {len(fit.ids)} token{many} ({shown}{', …' if len(fit.ids) > 5 else ''})"
    )
    yield Hypothesis("semantic/logit-bias", message, _with(explanation, fit.ids, size), 1 + len(fit.ids))


class _Fit(NamedTuple):
    ids: tuple[int, ...]
    size: float
    """Of the bias, in logprobs."""
    cost: float


def _pursued(seen: SeenTokens) -> _Fit:
    """One id after the other, as long as each pays."""
    price = PRICE + np.log(seen.masses.shape[1])
    best = _Fit((), 0.0, _cost(seen.residual, seen.sigma))
    while len(best.ids) < MOST_TOKENS:
        tried = [_fitted(seen, (*best.ids, new)) for new in _candidates(seen, best)]
        further = min(tried, key=lambda fit: fit.cost, default=best)
        if further.cost > best.cost - price:
            break
        best = further
    return _without_idle(seen, best, price)


def _explains(seen: SeenTokens, fit: _Fit) -> bool:
    """Whether half of what is off is no more, and one number for every token does not do as well as the ids do."""
    if _cost(seen.residual - np.median(seen.residual), seen.sigma) <= fit.cost:
        return False
    off = np.abs(seen.residual) > OFF * seen.sigma
    left, sigma = _left(seen, fit)[off], seen.sigma[off]
    return _cost(left, sigma) <= (1 - LEAST_GAIN) * _cost(seen.residual[off], sigma)


def _left(seen: SeenTokens, fit: _Fit) -> Floats:
    mass = seen.masses[:, list(fit.ids)].sum(axis=1, dtype=np.float64)
    left: Floats = seen.residual - moved(fit.size, np.isin(seen.tokens, fit.ids), mass)
    return left


def _without_idle(seen: SeenTokens, fit: _Fit, price: float) -> _Fit:
    """An id that came early may have stood for others that came later."""
    for idle in fit.ids:
        fewer = _fitted(seen, tuple(token for token in fit.ids if token != idle))
        if len(fit.ids) > 1 and fewer.cost < fit.cost + price:
            fit = fewer
    return fit._replace(ids=tuple(sorted(fit.ids)))


def _fitted(seen: SeenTokens, ids: tuple[int, ...]) -> _Fit:
    """The size that most tokens agree on: by the biased ones alone, or by all."""
    own, mass = np.isin(seen.tokens, ids), seen.masses[:, list(ids)].sum(axis=1, dtype=np.float64)
    sizes = {_agreed(seen.residual, own, mass, where) for where in (own, np.ones_like(own))}
    fits = [
        _Fit(ids, size, _cost(seen.residual - moved(size, own, mass), seen.sigma))
        for size in sizes
        if size != 0.0
    ]
    return min(fits, key=lambda fit: fit.cost, default=_Fit(ids, 0.0, np.inf))


def moved(size: float, own: Bools, mass: Floats) -> Floats:
    """By how much a bias moves logprobs: of tokens that are biased or not, beside biased mass."""
    result: Floats = size * own - np.log1p(np.expm1(size) * np.minimum(mass, 1.0))
    return result


def _agreed(residual: Floats, own: Bools, mass: Floats, where: Bools) -> float:
    """Median of the sizes that single tokens ask for, each by how much it would show."""
    mass = np.clip(mass, 1e-12, 1 - 1e-12)
    # Solved for b: of a biased token, and of another.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        by_own = residual + np.log1p(-mass) - np.log1p(-mass * np.exp(residual))
        by_mass = np.log1p(np.expm1(-residual) / mass)
    sizes = np.where(own, by_own, by_mass)
    weights = np.where(own, 1 - mass, mass)
    possible = where & np.isfinite(sizes) & (np.abs(sizes) <= MOST_BIAS)
    if not possible.any():
        # Every other token says that nothing was left of the mass.
        return -MOST_BIAS if where.any() and np.isneginf(by_mass[where & ~own]).any() else 0.0
    order = np.argsort(sizes[possible])
    below = np.cumsum(weights[possible][order])
    return float(sizes[possible][order][np.searchsorted(below, below[-1] / 2)])


def _candidates(seen: SeenTokens, fit: _Fit) -> list[int]:
    """Ids whose own numbers are off most, and ids whose mass goes with what is left of the others."""
    left = _left(seen, fit)
    off = np.log1p((left / seen.sigma) ** 2) * np.sign(left)
    by_token = np.bincount(seen.tokens, weights=off, minlength=seen.masses.shape[1])
    # In units of its own length, as a regression on it alone would have it.
    length = np.sqrt((seen.masses**2).sum(axis=0)) + 1e-6
    # Each side by itself: the tokens of an id that is not known yet are far off, and to the other side than its mass.
    by_mass = (
        (np.expm1(np.clip(side * left, 0.0, WILD)).astype(np.float32) @ seen.masses) / length
        for side in (1, -1)
    )
    ranked = (np.argsort(-scores)[:CANDIDATES] for scores in (by_token, -by_token, *by_mass))
    known = set(fit.ids)
    return [token for token in dict.fromkeys(np.concatenate([*ranked]).tolist()) if token not in known]


def _cost(left: Floats, sigma: Floats) -> float:
    """In nats, as attribution has it."""
    return float(np.log1p((left / sigma) ** 2).sum())


def _refined(explanation: Explanation, fit: _Fit, temperature: float, cost: Cost) -> float:
    """By the cost that decides; a round value where one does as well. A bias is added before temperature divides."""

    def at(size: float) -> float:
        return cost(_with(explanation, fit.ids, size))

    guess = fit.size * (temperature or 1.0)
    bounds = tuple(sorted((guess * (1 - AROUND), guess * (1 + AROUND))))
    near = float(minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 1e-7}).x)
    best = min((guess, near), key=at)
    return round(best, 2) if round(best, 2) and at(round(best, 2)) <= at(best) + 1 else best


def _with(explanation: Explanation, tokens: Sequence[int], size: float) -> Explanation:
    return msgspec.structs.replace(explanation, bias=dict.fromkeys(tokens, float(size)))
