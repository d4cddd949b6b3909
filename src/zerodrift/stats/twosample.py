"""Do two samples come from one distribution?

Energy distance for differences that hide in the tails, and a permutation test of means for discrete rewards, whose ties
would break a Kolmogorov-Smirnov test (continuous values have `scipy.stats.ks_2samp`). Permutation p-values count the
observed labelling among the permuted, (1 + hits) / (1 + permutations), so they are never 0 and are valid for
every sample size. The null is that all values are exchangeable: give one value per sequence, not per token. Where they
are so only within groups, as rewards of one prompt are, `Strata` keeps the labels of each group to itself.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, Ids, same_shape, vector

_CELLS_PER_BLOCK = 2**20


class Strata(NamedTuple):
    """The group that each value of either sample belongs to; labels are exchanged within groups alone.

    A group counts by n·m / (n + m), n and m being its values in either sample (Cochran-Mantel-Haenszel): where both have
    equally many, by its size. One that has values of a single sample compares nothing and counts nothing.
    """

    first: npt.ArrayLike
    second: npt.ArrayLike


class TwoSampleResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a two-sample test found."""

    test: str
    statistic: float
    p_value: float
    first_count: int
    second_count: int


def energy_distance(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    generator: np.random.Generator,
    *,
    permutations: int = 999,
    strata: Strata | None = None,
) -> TwoSampleResult:
    """2 E|X-Y| - E|X-X'| - E|Y-Y'| = 2 ∫ (F-G)² (Székely & Rizzo): zero only if the distributions are equal.

    With strata F and G are the mixtures of the groups, by their weights.
    """
    x, y = vector("first", first), vector("second", second)
    pooled = np.concatenate((x, y))
    order = np.argsort(pooled)
    gaps = np.diff(pooled[order])

    # F - G between neighbouring values is the running sum of the contrast, so a permutation costs n + m, not n·m.
    def statistic(contrast: Floats) -> Floats:
        return np.asarray(2 * (np.cumsum(contrast, axis=-1)[..., :-1] ** 2 @ gaps))

    groups = _groups(x, y, strata)
    contrast = _contrast(x, y, groups)[order]
    relabel = _relabelling(contrast, groups[order], generator)
    p_value = _permutation_p(statistic, contrast, float(np.ptp(pooled)), relabel, permutations)
    return _result("energy-distance", x, y, float(statistic(contrast)), p_value)


def mean_difference(
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    generator: np.random.Generator,
    *,
    permutations: int = 9999,
    strata: Strata | None = None,
) -> TwoSampleResult:
    """mean(first) - mean(second), two-sided; ties, as between rewards of 0 and 1, do it no harm.

    With strata it is the weighted mean of the differences within the groups.
    """
    x, y = vector("first", first), vector("second", second)
    pooled = np.concatenate((x, y))
    # A contrast sums to 0, so centring changes nothing but the rounding.
    centred = pooled - pooled.mean()
    groups = _groups(x, y, strata)
    contrast = _contrast(x, y, groups)
    relabel = _relabelling(contrast, groups, generator)
    p_value = _permutation_p(
        lambda labels: np.abs(labels @ centred), contrast, float(np.ptp(pooled)), relabel, permutations
    )
    return _result("mean-difference", x, y, float(contrast @ centred), p_value)


def least_mean_p(first: npt.ArrayLike, second: npt.ArrayLike, strata: Strata | None = None) -> float:
    """The least p-value that `mean_difference` could have found, however these very values were labelled.

    Where it lies above the level of a test, that test was decided before it was made (Tarone 1990). It is 1 where the
    values of every group are tied.
    """
    x, y = vector("first", first), vector("second", second)
    values, groups = np.concatenate((x, y)), _groups(x, y, strata)
    contrast, ours = _contrast(x, y, groups), np.arange(values.size) < x.size
    high = low = log_high = log_low = 0.0
    for group in np.unique(groups[contrast != 0]):
        inside = groups == group
        ranked, n = np.sort(values[inside]), int((inside & ours).sum())
        weight, rest = float(contrast[inside & ours].sum()), ranked.size - n
        high += weight * float(ranked[rest:].mean() - ranked[:rest].mean())
        low += weight * float(ranked[:n].mean() - ranked[n:].mean())
        log_high += _log_share(ranked, ranked[rest], n)
        log_low += _log_share(-ranked[::-1], -ranked[n - 1], n)
    # Labellings of the largest |difference|: those at one end, or at both where the ends are equally far.
    tie, furthest = 1e-12 * float(np.ptp(values)), max(abs(high), abs(low))
    if high - low <= tie:
        return 1.0
    ends = ((high, log_high), (low, log_low))
    return min(1.0, sum(math.exp(share) for end, share in ends if abs(end) >= furthest - tie))


def _log_share(ranked: Floats, edge: float, n: int) -> float:
    """log of the share of labellings that give the n largest of a group to one side; `edge` is the least of those."""
    tied, above = int((ranked == edge).sum()), int((ranked > edge).sum())
    return math.log(math.comb(tied, n - above)) - math.log(math.comb(ranked.size, n))


def _groups(x: Floats, y: Floats, strata: Strata | None) -> Ids:
    """Of each value, numbered from 0; all in one where there are no strata."""
    if strata is None:
        return np.zeros(x.size + y.size, dtype=np.int64)
    for name, values, ids in (("first", x, strata.first), ("second", y, strata.second)):
        same_shape(name, values, f"strata of {name}", np.asarray(ids))
    _, groups = np.unique(np.concatenate((strata.first, strata.second)), return_inverse=True)
    return groups.astype(np.int64)


def _contrast(x: Floats, y: Floats, groups: Ids) -> Floats:
    """What each value is multiplied by: w/n in the first sample and -w/m in the second, w being its group's weight."""
    size = int(groups.max()) + 1
    n, m = (
        np.bincount(part, minlength=size).astype(np.float64) for part in (groups[: x.size], groups[x.size :])
    )
    # n·m / (n + m), without its common factor n·m: n and m may be 0.
    first, second = m / (n + m), n / (n + m)
    total = float((n * first).sum())
    if total == 0:
        raise InvalidValue("no group has values of both samples; nothing can be compared")
    return np.concatenate((first[groups[: x.size]], -second[groups[x.size :]])) / total


def _relabelling(contrast: Floats, groups: Ids, generator: np.random.Generator) -> Callable[[int], Floats]:
    """Rows of `contrast`, each with the entries of every group shuffled among themselves."""
    by_group = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    # Groups of one size are shuffled together, as rows of one array.
    blocks = [
        by_group[starts[sizes == size][:, None] + np.arange(size)] for size in np.unique(sizes[sizes > 1])
    ]

    def relabel(rows: int) -> Floats:
        labels = np.tile(contrast, (rows, 1))
        for block in blocks:
            labels[:, block] = generator.permuted(labels[:, block], axis=2)
        return labels

    return relabel


def _permutation_p(
    statistic: Callable[[Floats], Floats],
    contrast: Floats,
    scale: float,
    relabel: Callable[[int], Floats],
    permutations: int,
) -> float:
    require.whole(InvalidValue, "permutations", permutations, "99 are the least that reach p = 0.01", 99)
    # Labellings with equal statistics must count as ties although their sums round differently.
    least = statistic(contrast) - 1e-12 * scale
    rows = max(1, _CELLS_PER_BLOCK // contrast.size)
    hits = 0
    for start in range(0, permutations, rows):
        hits += int((statistic(relabel(min(rows, permutations - start))) >= least).sum())
    return (1 + hits) / (1 + permutations)


def _result(test: str, x: Floats, y: Floats, statistic: float, p_value: float) -> TwoSampleResult:
    return TwoSampleResult(
        test=test, statistic=statistic, p_value=p_value, first_count=x.size, second_count=y.size
    )
