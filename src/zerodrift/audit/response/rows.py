"""From which row to which? The range of rows or channels that Δ follows best, and how sure its ends are. Torch-free.

The effect of a range is the difference of two running sums, so that every pair of ends is tried by one product of
matrices: coarsely first, then row by row around the ends that were best.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.stats.arrays import Floats

COARSE = 128
"""Ends that are tried first, evenly over all rows."""
DOUBT = 12.0
"""Of the variance of a token's rest: ends that fit worse by more are excluded. Under noise of 0.6 of the
effect 119 of 120 true ends were within, and 113 with 8: an end is searched for, and four would be too few."""
FINEST = 16
"""A round end is a multiple of so small a part of all rows; shards end there."""


class RowRange(NamedTuple):
    """A range of rows; the ends of each pair are the least and the most that fit as well."""

    first: int
    last: int
    """The one behind the last."""
    first_between: tuple[int, int]
    last_between: tuple[int, int]


def coarse_rows(steps: Floats, slopes_NR: Floats) -> tuple[int, int]:
    """About from where to where: `steps` as a multiple of the sum of consecutive columns."""
    return _coarse(steps, _sums(slopes_NR))


def best_rows(steps: Floats, slopes_NR: Floats) -> RowRange:
    """The same to the row, and how sure it is."""
    total, sums = slopes_NR.shape[1], _sums(slopes_NR)
    first, last = _coarse(steps, sums)
    step = -(-total // COARSE)
    firsts, lasts = _near(first, step, total), _near(last, step, total)
    left_AB = _left(steps, sums, firsts, lasts)
    first, last = _best(left_AB, firsts, lasts)
    # Beyond this an end does not fit, with the other end where it is best.
    least = float(left_AB.min())
    most = least + DOUBT * max(least, 1e-9 * float(steps @ steps)) / max(len(steps) - 3, 1)
    every = np.arange(total + 1)
    begins = np.flatnonzero(_left(steps, sums, every, np.array([last]))[:, 0] <= most)
    ends = np.flatnonzero(_left(steps, sums, np.array([first]), every)[0] <= most)
    between = (int(begins.min()), int(begins.max())), (int(ends.min()), int(ends.max()))
    return RowRange(_round(first, between[0], total), _round(last, between[1], total), *between)


def _sums(slopes_NR: Floats) -> Floats:
    return np.concatenate(
        [np.zeros((len(slopes_NR), 1)), np.cumsum(slopes_NR, axis=1, dtype=np.float64)], axis=1
    )


def _coarse(steps: Floats, sums: Floats) -> tuple[int, int]:
    total = sums.shape[1] - 1
    ends = np.unique(np.linspace(0, total, min(total, COARSE) + 1).astype(np.int64))
    return _best(_left(steps, sums, ends, ends), ends, ends)


def _near(end: int, step: int, total: int) -> NDArray[np.int64]:
    return np.arange(max(0, end - step), min(total, end + step) + 1)


def _best(left_AB: Floats, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> tuple[int, int]:
    first, last = np.unravel_index(int(left_AB.argmin()), left_AB.shape)
    return int(firsts[first]), int(lasts[last])


def _left(steps: Floats, sums: Floats, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> Floats:
    """What each pair of ends leaves of Σ steps²; infinite where they are none."""
    begin_NA, end_NB = sums[:, firsts], sums[:, lasts]
    along_AB = (steps @ end_NB)[None, :] - (steps @ begin_NA)[:, None]
    size_AB = (end_NB**2).sum(axis=0)[None, :] + (begin_NA**2).sum(axis=0)[:, None] - 2 * begin_NA.T @ end_NB
    # Rows that no token depends on have no size, and differences of large sums a little.
    usable_AB = (firsts[:, None] < lasts[None, :]) & (size_AB > 1e-9 * max(float(size_AB.max()), 1e-300))
    gone_AB = along_AB**2 / np.where(usable_AB, size_AB, 1.0)
    left_AB: Floats = np.where(usable_AB, float(steps @ steps) - gone_AB, np.inf)
    return left_AB


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
