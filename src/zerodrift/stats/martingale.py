"""Do the sampled tokens follow the distribution that they claim?

If token i was drawn from the claimed p_i, the surprise log p_i(x_i) has mean -H_i and variance Var_i given all
that came before, so the steps log p_i + H_i are martingale differences and, by the martingale central limit
theorem,

    z = Σ (log p_i + H_i) / √ Σ Var_i  →  N(0, 1)

however the tokens depend on each other. Sharper sampling than claimed (a lower temperature, truncation, a greedy
fallback) makes z positive, flatter sampling negative; a wrong but equally sharp distribution is not seen here.
"""

import math

import msgspec
import numpy as np
import numpy.typing as npt

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, same_shape, vector

LEAST_VARIANCE = 1e-6
"""Nats². Below it every claimed distribution is a point, and nothing was sampled that could be tested."""
LARGEST_STEP = 0.75
"""Standard deviations. Near-certain tokens make rare steps of log p = -7 and more, and where one step moves z by
more than this the sum is no Gaussian yet: 83 honest tokens of p = (0.999, 0.001) show |z| > 3 in 8 % of runs.
With the bound that family stays below 1.3 % at every length (1,882 is the worst), and of honest runs at 1.8 nats of
entropy it calls vacuous about 1 % at 50 tokens and none of 250 at 150."""
BEYOND_CHANCE = 30.0
"""Standard deviations, beside the largest step. A token of weight s comes by chance 1/s² times in a run: two of weight
30 in one run of two million. What is left of z then belongs to many tokens, however heavy each of them is."""


class SamplingFidelity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The test's answer; where `vacuous`, z and p say nothing and the probe is inconclusive."""

    tokens: int
    z: float
    """Positive: the tokens are likelier than they would be if sampled as claimed."""
    p_value: float
    """Two-sided."""
    variance: float
    """Σ Var_i in nats²."""
    largest_step: float
    """max |log p_i + H_i| in standard deviations of the sum."""
    vacuous: bool


def sampling_fidelity(
    logprobs: npt.ArrayLike, entropies: npt.ArrayLike, variances: npt.ArrayLike
) -> SamplingFidelity:
    """Test sampled tokens, given log p_i of each and H_i, Var_i of log p_i under the claimed distribution."""
    logprob = vector("logprobs", logprobs)
    entropy, variance = vector("entropies", entropies), vector("variances", variances)
    same_shape("logprobs", logprob, "entropies", entropy)
    same_shape("logprobs", logprob, "variances", variance)
    # The same hair that completions allow for an fp32 softmax.
    _check_sign("logprobs", -logprob, 1e-4)
    _check_sign("entropies", entropy, 1e-4)
    _check_sign("variances", variance, 0.0)
    steps, total = logprob + entropy, float(variance.sum())
    if total < LEAST_VARIANCE:
        return SamplingFidelity(
            tokens=steps.size, z=0.0, p_value=1.0, variance=total, largest_step=0.0, vacuous=True
        )
    deviation = math.sqrt(total)
    z, largest = float(steps.sum()) / deviation, float(np.abs(steps).max()) / deviation
    return SamplingFidelity(
        tokens=steps.size,
        z=z,
        p_value=math.erfc(abs(z) / math.sqrt(2)),
        variance=total,
        largest_step=largest,
        vacuous=largest > LARGEST_STEP and abs(z) < BEYOND_CHANCE + largest,
    )


def _check_sign(name: str, values: Floats, hair: float) -> None:
    if values.min() < -hair:
        position = int(values.argmin())
        raise InvalidValue(
            f"{name}[{position}] is {abs(values[position])} on the wrong side of 0; log p is at most 0, "
            "entropy and variance at least 0: compute Var as Σ p (log p + H)², which cannot go negative"
        )
