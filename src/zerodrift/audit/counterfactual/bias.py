"""A hypothesis about single tokens: some carry a constant bias in the engine.

Biased tokens stand out among the sampled ones: their residual is the bias less what it does to the normaliser, that
of the others is the normaliser alone. The set is read off the residuals by token, the size is fitted.
"""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from zerodrift.audit.counterfactual.account import Account, Hypothesis

Floats = NDArray[np.float64]
LEAST_SEEN = 3
"""Sampled fewer times than this, a token shows chance, not bias."""
MOST_TOKENS = 20


def bias_hypotheses(
    account: Account, residual: Floats, tokens: NDArray[np.int64], cost: Callable[[Account], float]
) -> Iterator[Hypothesis]:
    """The tokens that stand out, with the bias that fits best."""
    if account.bias:
        return
    suspects = _suspects(residual, tokens)
    if not suspects:
        return

    def at(size: float) -> Account:
        return msgspec.structs.replace(account, bias=dict.fromkeys(suspects, float(size)))

    # Of either sign; the first look decides the side.
    side = 1.0 if cost(at(1.0)) < cost(at(-1.0)) else -1.0
    bounds = tuple(sorted((0.05 * side, 10.0 * side)))
    best = minimize_scalar(
        lambda size: cost(at(size)), bounds=bounds, method="bounded", options={"xatol": 1e-6}
    )
    shown = ", ".join(str(token) for token in suspects[:5])
    says = f"a bias of {best.x:+.3g} on {len(suspects)} tokens ({shown}{', …' if len(suspects) > 5 else ''})"
    yield Hypothesis("semantic/logit-bias", says, at(float(best.x)), 2)


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
