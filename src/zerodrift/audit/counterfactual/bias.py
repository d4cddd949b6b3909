"""A hypothesis about single tokens: some carry a constant bias in the engine.

Biased tokens stand out among the sampled ones: their residual is the bias less what it does to the normaliser, that
of the others is the normaliser alone. The set is read off the residuals by token, the size is fitted. A biased token that
is likely anyway stands out less (+2 moves a token of 0.5 by 0.57); once the bias of the others is known, it is the only
kind that is still off to their side, and joins them.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis

Floats = NDArray[np.float64]
LEAST_SEEN = 3
"""Sampled fewer times than this, a token shows chance, not bias."""
MOST_TOKENS = 20
LEAST_LEFT = 0.02
"""In units of the bias: that of 2 moves a token of probability 0.95 by 0.04."""


def bias_hypotheses(
    explanation: Explanation,
    residual: Callable[[Explanation], Floats],
    tokens: NDArray[np.int64],
    cost: Callable[[Explanation], float],
) -> Iterator[Hypothesis]:
    """The tokens that stand out, with the bias that fits best."""
    if explanation.bias:
        return
    suspects = _suspects(residual(explanation), tokens)
    if not suspects:
        return
    size = _fitted(explanation, suspects, cost)
    left = residual(_with(explanation, suspects, size))
    if others := _on_the_same_side(left, tokens, size, MOST_TOKENS - len(suspects)):
        suspects = sorted({*suspects, *others})
        size = _fitted(explanation, suspects, cost)
    shown = ", ".join(str(token) for token in suspects[:5])
    message = f"a bias of {size:+.3g} on {len(suspects)} tokens ({shown}{', …' if len(suspects) > 5 else ''})"
    yield Hypothesis("semantic/logit-bias", message, _with(explanation, suspects, size), 2)


def _with(explanation: Explanation, tokens: Sequence[int], size: float) -> Explanation:
    return msgspec.structs.replace(explanation, bias=dict.fromkeys(tokens, float(size)))


def _fitted(explanation: Explanation, tokens: Sequence[int], cost: Callable[[Explanation], float]) -> float:
    """Of either sign; the first look decides the side."""

    def at(size: float) -> float:
        return cost(_with(explanation, tokens, size))

    side = 1.0 if at(1.0) < at(-1.0) else -1.0
    bounds = tuple(sorted((0.05 * side, 10.0 * side)))
    return float(minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x)


def _on_the_same_side(left: Floats, tokens: NDArray[np.int64], size: float, most: int) -> list[int]:
    """Tokens that are still off to the side of the bias; none where they are too many to be a list of words."""
    off = np.isfinite(left) & (left * np.sign(size) > LEAST_LEFT * abs(size))
    found = np.unique(tokens[off])
    return found.tolist() if len(found) <= most else []


def _suspects(residual: Floats, tokens: NDArray[np.int64]) -> list[int]:
    """Tokens whose mean residual is nearer to the largest than to the typical one."""
    known = np.isfinite(residual)
    counts = np.bincount(tokens[known])
    sums = np.bincount(tokens[known], weights=residual[known])
    often = np.flatnonzero(counts >= LEAST_SEEN)
    if len(often) < 2 * LEAST_SEEN:
        return []
    means = sums[often] / counts[often]
    typical = float(np.median(means))
    spread = means - typical
    extreme = spread[np.argmax(np.abs(spread))]
    chosen = often[spread * np.sign(extreme) > np.abs(extreme) / 2]
    return chosen.tolist() if len(chosen) <= MOST_TOKENS else []
