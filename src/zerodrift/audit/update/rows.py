"""From which row to which? The range of rows whose update Δ follows best, and how sure its ends are. Torch-free.

The effect of a range is the difference of two running sums, so that every pair of ends is tried by one product of
matrices: coarsely first, then row by row around the ends that were best.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.stats.arrays import Floats

COARSE = 128
"""Ends that are tried first, evenly over all rows."""
DOUBT = 4.0
"""Of the variance of a token's rest: ends that fit worse by more are excluded, at two standard deviations."""
FINEST = 64
"""A round end is a multiple of so small a part of all rows; shards end there."""


class Rows(NamedTuple):
    """A range of rows; the ends of each pair are the least and the most that fit as well."""

    first: int
    last: int
    """The one behind the last."""
    first_between: tuple[int, int]
    last_between: tuple[int, int]


def best_rows(steps: Floats, slopes_NR: Floats) -> Rows:
    """`steps` as a multiple of the sum of consecutive columns."""
    total = slopes_NR.shape[1]
    sums = np.concatenate([np.zeros((len(steps), 1)), np.cumsum(slopes_NR, axis=1, dtype=np.float64)], axis=1)
    coarse = np.unique(np.linspace(0, total, min(total, COARSE) + 1).astype(np.int64))
    first, last = _fitting(steps, sums, coarse, coarse)[:2]
    step = -(-total // COARSE)
    firsts, lasts = _near(first, step, total), _near(last, step, total)
    return Rows(*_chosen(*_fitting(steps, sums, firsts, lasts), total))


def _near(end: int, step: int, total: int) -> NDArray[np.int64]:
    return np.arange(max(0, end - step), min(total, end + step) + 1)


def _fitting(
    steps: Floats, sums: Floats, firsts: NDArray[np.int64], lasts: NDArray[np.int64]
) -> tuple[int, int, NDArray[np.int64], NDArray[np.int64]]:
    """The best pair of ends, and all those that fit as well."""
    begin_NA, end_NB = sums[:, firsts], sums[:, lasts]
    along_AB = (steps @ end_NB)[None, :] - (steps @ begin_NA)[:, None]
    size_AB = (end_NB**2).sum(axis=0)[None, :] + (begin_NA**2).sum(axis=0)[:, None] - 2 * begin_NA.T @ end_NB
    # Rows that no token depends on have no size, and differences of large sums a little.
    usable_AB = (firsts[:, None] < lasts[None, :]) & (size_AB > 1e-9 * max(float(size_AB.max()), 1e-300))
    left_AB = np.where(
        usable_AB, float(steps @ steps) - along_AB**2 / np.where(usable_AB, size_AB, 1.0), np.inf
    )
    least = float(left_AB.min())
    slack = DOUBT * max(least, 1e-9 * float(steps @ steps)) / max(len(steps) - 3, 1)
    where = np.unravel_index(int(left_AB.argmin()), left_AB.shape)
    fits_A, fits_B = np.nonzero(left_AB <= least + slack)
    return int(firsts[where[0]]), int(lasts[where[1]]), firsts[fits_A], lasts[fits_B]


def _chosen(
    first: int, last: int, firsts: NDArray[np.int64], lasts: NDArray[np.int64], total: int
) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    between = (int(firsts.min()), int(firsts.max())), (int(lasts.min()), int(lasts.max()))
    return _round(first, between[0], total), _round(last, between[1], total), *between


def _round(best: int, between: tuple[int, int], total: int) -> int:
    """Of ends that fit alike the roundest: 0, all, a half, a quarter …"""
    parts = 1
    while parts <= FINEST:
        for number in range(parts + 1):
            end = total * number // parts
            if between[0] <= end <= between[1]:
                return end
        parts *= 2
    return best
