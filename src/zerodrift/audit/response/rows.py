"""Embeddings of many tokens that are off by one and the same factor: too many for a pursuit of a few knobs.

Rows are taken one after the other, by what is left of Δ, and only those stay that ask for the same factor as the others do:
rows that fit by chance ask for any. Whether that is all of Δ, the proof must tell. Torch-free.
"""

from collections.abc import Sequence

import numpy as np

from zerodrift.stats.arrays import Floats

MOST_ROWS = 40
FEWEST_ROWS = 2
TOKENS_PER_ROW = 5
"""So many judged tokens must speak for each row: with as many rows as tokens anything fits."""
ENOUGH = 1e-3
"""Share of Δ² that is left where no further row is looked for."""
AGREE = 0.35
"""Relative distance from the factor that most ask for."""


def alike_rows(steps: Floats, slopes_NR: Floats) -> tuple[list[int], float]:
    """Columns that ask for one factor, and that factor less 1; no column where they do not agree."""
    most = min(MOST_ROWS, len(steps) // TOKENS_PER_ROW, slopes_NR.shape[1])
    chosen, values = _pursued(steps, slopes_NR, most)
    if len(chosen) < FEWEST_ROWS:
        return [], 0.0
    sizes = np.linalg.norm(slopes_NR[:, chosen], axis=0) * np.abs(values)
    common = _weighted_median(values, sizes)
    kept = [
        column
        for column, value in zip(chosen, values, strict=True)
        if abs(value - common) <= AGREE * abs(common)
    ]
    if len(kept) < FEWEST_ROWS:
        return [], 0.0
    together = slopes_NR[:, kept].sum(axis=1).astype(np.float64)
    return kept, float(together @ steps / (together @ together))


def _pursued(steps: Floats, slopes_NR: Floats, most: int) -> tuple[list[int], Floats]:
    sizes_R = np.linalg.norm(slopes_NR.astype(np.float64), axis=0)
    usable_R = sizes_R > 1e-6 * max(float(sizes_R.max(initial=0.0)), 1e-30)
    left, chosen, values = steps, list[int](), np.zeros(0)
    while len(chosen) < most and float(left @ left) > ENOUGH * float(steps @ steps):
        fit_R = np.where(usable_R, np.abs(left @ slopes_NR) / np.maximum(sizes_R, 1e-30), -1.0)
        fit_R[chosen] = -1.0
        if (best := int(np.argmax(fit_R))) in chosen or fit_R[best] <= 0:
            break
        chosen.append(best)
        columns = slopes_NR[:, chosen].astype(np.float64)
        values = np.linalg.lstsq(columns, steps, rcond=None)[0]
        left = steps - columns @ values
    return chosen, values


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2)])


def named(tokens: Sequence[int]) -> str:
    """A few of them."""
    shown = ", ".join(map(str, tokens[:5]))
    return f"embedding of {len(tokens)} tokens ({shown}{', …' if len(tokens) > 5 else ''})"
