"""Do two samples come from one distribution?

Kolmogorov-Smirnov for continuous values, energy distance for differences that hide in the tails, and a
permutation test of means for discrete rewards, whose ties break the first. Permutation p-values count the
observed labelling among the permuted, (1 + hits) / (1 + permutations), so they are never 0 and are valid for
every sample size. The null is that all values are exchangeable: give one value per sequence, not per token.
"""

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import special

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, vector

_CELLS_PER_BLOCK = 2**20
# Values in both samples. The exact distribution costs about a second there; beyond it the limit law is off by 1e-4
# for equal samples, and 6 % too large for 100 against 100,000.
_LARGEST_EXACT = 10_000


class TwoSampleResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a two-sample test found."""

    test: str
    statistic: float
    p_value: float
    first_count: int
    second_count: int


def kolmogorov_smirnov(first: npt.ArrayLike, second: npt.ArrayLike) -> TwoSampleResult:
    """Greatest distance between the two distribution functions, two-sided; conservative where values are tied."""
    x, y = vector("first", first), vector("second", second)
    values, n, m = np.concatenate((x, y)), x.size, y.size
    up_to_x, up_to_y = (np.searchsorted(np.sort(sample), values, side="right") for sample in (x, y))
    # In units of 1/nm the statistic is a whole number, so no tie is decided by rounding.
    height = int(np.abs(up_to_x * m - up_to_y * n).max())
    if n + m <= _LARGEST_EXACT:
        p_value = _path_mass(height, n, m)
    else:
        p_value = float(special.kolmogorov(height / np.sqrt(float(n) * m * (n + m))))
    return _result("kolmogorov-smirnov", x, y, height / (n * m), p_value)


def energy_distance(
    first: npt.ArrayLike, second: npt.ArrayLike, generator: np.random.Generator, *, permutations: int = 999
) -> TwoSampleResult:
    """2 E|X-Y| - E|X-X'| - E|Y-Y'| = 2 ∫ (F-G)² (Székely & Rizzo): zero only if the distributions are equal."""
    x, y = vector("first", first), vector("second", second)
    pooled = np.concatenate((x, y))
    order = np.argsort(pooled)
    gaps = np.diff(pooled[order])

    # F - G between neighbouring values is the running sum of the contrast, so a permutation costs n + m, not n·m.
    def statistic(contrast: Floats) -> Floats:
        return np.asarray(2 * (np.cumsum(contrast, axis=-1)[..., :-1] ** 2 @ gaps))

    contrast = _contrast(x, y)[order]
    p_value = _permutation_p(statistic, contrast, float(np.ptp(pooled)), generator, permutations)
    return _result("energy-distance", x, y, float(statistic(contrast)), p_value)


def mean_difference(
    first: npt.ArrayLike, second: npt.ArrayLike, generator: np.random.Generator, *, permutations: int = 9999
) -> TwoSampleResult:
    """mean(first) - mean(second), two-sided; ties, as between rewards of 0 and 1, do it no harm."""
    x, y = vector("first", first), vector("second", second)
    pooled = np.concatenate((x, y))
    # A contrast sums to 0, so centring changes nothing but the rounding.
    centred = pooled - pooled.mean()
    contrast = _contrast(x, y)
    p_value = _permutation_p(
        lambda labels: np.abs(labels @ centred), contrast, float(np.ptp(pooled)), generator, permutations
    )
    return _result("mean-difference", x, y, float(x.mean() - y.mean()), p_value)


def _path_mass(height: int, n: int, m: int) -> float:
    """Share of all orders of n + m values that reach |i·m - j·n| >= height, i and j being how many of each came.

    Only mass that leaves the band is added up, so that a p-value of 1e-30 keeps its digits.
    """
    i = np.arange(n + 1)
    inside, outside = np.zeros(n + 1), 0.0
    inside[0] = 1.0
    for drawn in range(n + m):
        left, j = n + m - drawn, drawn - i
        first, inside = inside * (n - i) / left, inside * (m - j) / left
        inside[1:] += first[:-1]
        gone = np.abs(i * m - (j + 1) * n) >= height
        outside += float(inside[gone].sum())
        inside[gone] = 0.0
    # All mass leaves at most once; a sum of n + m roundings may still end a hair above 1.
    return min(outside, 1.0)


def _contrast(x: Floats, y: Floats) -> Floats:
    return np.concatenate((np.full(x.size, 1 / x.size), np.full(y.size, -1 / y.size)))


def _permutation_p(
    statistic: Callable[[Floats], Floats],
    contrast: Floats,
    scale: float,
    generator: np.random.Generator,
    permutations: int,
) -> float:
    require.whole(InvalidValue, "permutations", permutations, "99 are the least that reach p = 0.01", 99)
    # Labellings with equal statistics must count as ties although their sums round differently.
    least = statistic(contrast) - 1e-12 * scale
    rows = max(1, _CELLS_PER_BLOCK // contrast.size)
    hits = 0
    for start in range(0, permutations, rows):
        labels = np.tile(contrast, (min(rows, permutations - start), 1))
        hits += int((statistic(generator.permuted(labels, axis=1)) >= least).sum())
    return (1 + hits) / (1 + permutations)


def _result(test: str, x: Floats, y: Floats, statistic: float, p_value: float) -> TwoSampleResult:
    return TwoSampleResult(
        test=test, statistic=statistic, p_value=p_value, first_count=x.size, second_count=y.size
    )
