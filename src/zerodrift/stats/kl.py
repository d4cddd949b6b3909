"""How far is the target policy from the one that sampled?

x ~ behaviour, r = log target(x) - log behaviour(x). Names follow Schulman (2020), "Approximating KL divergence";
all three estimate KL(behaviour || target), one value per token:

    k1 = -r               unbiased, high variance, may be negative
    k2 = r² / 2           biased in third order, never negative
    k3 = exp(r) - 1 - r   unbiased, never negative
"""

import numpy as np
import numpy.typing as npt
from scipy import special

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, finite, log_ratios, same_shape


def k1(r: npt.ArrayLike) -> Floats:
    """-r: its mean is the KL estimate with the least arithmetic and the most variance."""
    return -log_ratios(r)


def k2(r: npt.ArrayLike) -> Floats:
    """r² / 2: half the squared difference."""
    array = log_ratios(r)
    return array * array / 2


def k3(r: npt.ArrayLike) -> Floats:
    """exp(r) - 1 - r: what frameworks call the KL penalty."""
    return _k3(log_ratios(r))


def exact_kl(log_p: npt.ArrayLike, log_q: npt.ArrayLike) -> Floats:
    """KL(p || q) = Σ p (log p - log q) over the last axis, which is the whole vocabulary.

    Computed as Σ p k3(log q - log p), which is equal where both rows sum to one, has no negative term, and so
    keeps full relative precision between rows that agree to the last bits.
    """
    first, second = finite("log_p", log_p), finite("log_q", log_q)
    if first.ndim == 0:
        raise InvalidValue("log_p is a single number; give a row of logprobs over the whole vocabulary")
    same_shape("log_p", first, "log_q", second)
    _check_normalised("log_p", first)
    _check_normalised("log_q", second)
    r, p = second - first, np.exp(first)
    # Where q is many times p, p·k3 = q - p - p·r has nothing to cancel and exp(r) may not exist.
    return np.asarray(
        np.where(r < 1, p * _k3(np.minimum(r, 1.0)), np.exp(second) - p * (1 + r)).sum(axis=-1), np.float64
    )


def _k3(r: Floats) -> Floats:
    # expm1(r) - r has relative error 2e-16/r: at the 1e-7 of a healthy fp32 pair only 8 digits remain, and the
    # sign is up to libm. Below 0.01 six terms of the series are exact to float64 (the seventh is 5e-17).
    small = np.abs(r) < 1e-2
    x = np.where(small, r, 0.0)
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040)))))
    return np.where(small, series, np.expm1(r) - r)


def _check_normalised(name: str, rows: Floats) -> None:
    # An fp32 log-softmax over 150k tokens sums to 1 within 1e-5; logits, or a top-k report, miss by far more.
    excess = np.atleast_1d(special.logsumexp(rows, axis=-1))
    worst = float(excess.flat[np.abs(excess).argmax()])
    if abs(worst) > 1e-2:
        raise InvalidValue(
            f"{name} has a row whose probabilities sum to exp({worst:.3g}), not 1; "
            "give log_softmax over the whole vocabulary, in fp32 or better"
        )
