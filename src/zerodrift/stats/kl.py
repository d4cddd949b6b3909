"""How far is the target policy from the one that sampled?

x ~ behaviour, r = log target(x) - log behaviour(x). Names follow Schulman (2020), "Approximating KL divergence": k1 = -r
and k2 = r² / 2 need no code of their own, k3 = exp(r) - 1 - r needs care. All three estimate KL(behaviour || target).
"""

import numpy as np
import numpy.typing as npt

from zerodrift.stats.arrays import Floats, log_ratios


def k3(r: npt.ArrayLike) -> Floats:
    """exp(r) - 1 - r of each token: what frameworks call the KL penalty."""
    array = log_ratios(r)
    # expm1(r) - r has relative error 2e-16/r: at the 1e-7 of a healthy fp32 pair only 8 digits remain, and the
    # sign is up to libm. Below 0.01 six terms of the series are exact to float64 (the seventh is 5e-17).
    small = np.abs(array) < 1e-2
    x = np.where(small, array, 0.0)
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040)))))
    return np.where(small, series, np.expm1(array) - array)
