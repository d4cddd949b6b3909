"""How sure is a number?

Means over tokens get a bootstrap over *sequences*: tokens of one sequence move together, and an interval that
treats them as independent is too narrow by the square root of the design effect.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, same_shape, vector
from zerodrift.stats.sequences import sequence_sums

FEWEST_SEQUENCES = 20
"""Below it a percentile interval over resampled sequences is too narrow to be shown."""

# 8 MiB of indices at a time, whatever the number of sequences.
_CELLS_PER_BLOCK = 2**20


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An estimate with the interval that covers the truth with the stated confidence."""

    estimate: float
    low: float
    high: float
    confidence: float


def bootstrap_mean(
    values: npt.ArrayLike,
    sequence_ids: npt.ArrayLike,
    generator: np.random.Generator,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Mean over tokens, Σ values / Σ tokens, with a percentile interval over resampled sequences."""
    return bootstrap_ratio(
        values, np.ones(np.shape(values)), sequence_ids, generator, confidence=confidence, resamples=resamples
    )


def bootstrap_ratio(
    numerators: npt.ArrayLike,
    denominators: npt.ArrayLike,
    sequence_ids: npt.ArrayLike,
    generator: np.random.Generator,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Σ numerators / Σ denominators over tokens, for example the share of ΣΔ² that a cause leaves unexplained.

    A resample draws as many sequences as there are, with replacement, and needs only their sums. With fewer than
    about 20 sequences percentile intervals are known to be too narrow: take more sequences, not more resamples.
    """
    _check_confidence(confidence)
    require.whole(InvalidValue, "resamples", resamples, "100 are the least that give a 95 % interval", 100)
    above, below = vector("numerators", numerators), vector("denominators", denominators)
    same_shape("numerators", above, "denominators", below)
    if (below < 0).any():
        raise InvalidValue(
            f"denominators[{int(below.argmin())}] is {below.min()}; they are weights, at least 0"
        )
    tops, bottoms = sequence_sums(above, sequence_ids), sequence_sums(below, sequence_ids)
    if tops.size < 2:
        raise InvalidValue("one sequence has no spread between sequences; sample at least 2, better 20")
    ratios = _resampled_ratios(tops, bottoms, generator, resamples)
    low, high = np.quantile(ratios, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(float(tops.sum() / bottoms.sum()), float(low), float(high), confidence)


def _resampled_ratios(
    tops: Floats, bottoms: Floats, generator: np.random.Generator, resamples: int
) -> Floats:
    rows = max(1, _CELLS_PER_BLOCK // tops.size)
    blocks = []
    for start in range(0, resamples, rows):
        picks = generator.integers(tops.size, size=(min(rows, resamples - start), tops.size))
        weights = bottoms[picks].sum(axis=1)
        if (weights == 0).any():
            raise InvalidValue(
                f"a resample of {tops.size} sequences has denominators that sum to 0; "
                f"{int((bottoms == 0).sum())} of them carry none: leave those out, or take more sequences"
            )
        blocks.append(tops[picks].sum(axis=1) / weights)
    return np.concatenate(blocks)


def _check_confidence(confidence: float) -> None:
    require.real(InvalidValue, "confidence", confidence, "it lies between 0 and 1, for example 0.95", 0, 1)
    if confidence in (0, 1):
        raise InvalidValue(f"confidence is {confidence}; it lies strictly between 0 and 1, for example 0.95")
