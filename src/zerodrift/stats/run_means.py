"""Two kinds of training, a few runs of each: do they differ by more than runs of one kind do?

A run is one observation. Its steps follow from each other, so a thousand of them, with a million tokens, say no more of the
next seed than one mean does; what they do is make that mean a sum of very many, and so nearly normal. Hence Student's test on
the means of runs (`summaries.mean_shift`), whose null, one distribution for both, is the question that is asked.

A permutation of whole runs would assume less, and cannot answer: three runs against three can be divided in 20 ways, so its
p-value is never below 0.1 (`least_rank_p`), whatever is seen. Four reach 0.029, five 0.008.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.summaries import Summary

POWER = 0.95
"""What is called seen is seen 19 times in 20."""


def summary_of_runs(means: Sequence[float]) -> Summary:
    """Of at least two runs, one number each."""
    if len(means) < 2:
        raise InvalidValue(f"{len(means)} runs have no spread; give at least two")
    return Summary(float(np.mean(means)), float(np.std(means, ddof=1)), len(means))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted for their number (Holm 1979): one below α among these is chance with probability at most α."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, number in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[number]))
        adjusted[number] = largest
    return adjusted


def least_rank_p(first: int, second: int) -> float:
    """The least two-sided p-value that any test by ranks, or by permuting whole runs, could find."""
    ways = math.comb(first + second, first)
    return min(1.0, (2 if first == second else 1) / ways)


def detectable(spread: float, first: int, second: int, level: float) -> float:
    """Size of a difference that a test at `level` sees 19 times in 20, where single runs have this spread.

    By the noncentral distribution: Student's own quantiles, added, are seen 17 times in 20 by three runs against three.
    """
    degrees = first + second - 2
    error = spread * math.sqrt(2 / min(first, second))
    limit = special.stdtrit(degrees, 1 - level / 2)
    return float(special.nctdtrinc(degrees, 1 - POWER, limit)) * error


def began(differences: Sequence[float]) -> int:
    """The step from which on a series that had been about 0 is best told by another level: least squares over all steps."""
    if not differences:
        raise InvalidValue("a series without steps begins nowhere")
    # Σ d² falls by (Σ_{t>=k} d_t)² / (T - k) where a level is fitted from step k on.
    tails = np.cumsum(np.asarray(differences, dtype=np.float64)[::-1])[::-1]
    return int(np.argmax(tails**2 / np.arange(len(differences), 0, -1)))
