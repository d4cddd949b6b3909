"""Rows that ask for one factor are found among hundreds, and noise asks for none."""

import numpy as np
import pytest

from zerodrift.audit.response.rows import MOST_ROWS, alike_rows

TOKENS, ROWS = 240, 300


def slopes(rng: np.random.Generator) -> np.ndarray:
    """A row shows in few tokens: those behind it."""
    return rng.normal(size=(TOKENS, ROWS)) * (rng.random((TOKENS, ROWS)) < 0.15)


@pytest.mark.parametrize(("count", "factor"), [(3, -0.1), (17, 0.07)])
def test_rows_by_one_factor_are_found(count: int, factor: float) -> None:
    rng = np.random.default_rng(count)
    slopes_NR = slopes(rng)
    truth = sorted(rng.choice(ROWS, count, replace=False).tolist())
    steps = slopes_NR[:, truth].sum(axis=1) * factor + rng.normal(size=TOKENS) * 1e-3
    columns, value = alike_rows(steps, slopes_NR)
    assert sorted(columns) == truth
    assert value == pytest.approx(factor, rel=0.02)


def test_noise_is_explained_by_no_one_factor() -> None:
    rng = np.random.default_rng(8)
    slopes_NR, steps = slopes(rng), rng.normal(size=TOKENS)
    columns, value = alike_rows(steps, slopes_NR)
    assert len(columns) <= MOST_ROWS
    left = steps - slopes_NR[:, columns].sum(axis=1) * value
    assert (left**2).sum() > 0.5 * (steps**2).sum()
