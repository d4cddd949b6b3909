"""Which few knobs does Δ follow? Orthogonal matching pursuit, chosen on one half of the sequences and judged on the other.

Δ and derivatives are in units of each token. What a knob explains in the half that it was chosen on says nothing: of a
thousand columns one always fits 120 tokens to 15 %. What it explains in the other half does. How much that is by chance
is measured too: with the signs of whole sequences drawn anew, Δ follows nothing, and is searched as before. Torch-free.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.stats.arrays import Floats

MOST_KNOBS = 3
LEAST_GAIN = 0.02
"""R² that one more knob must add in sequences that it was not chosen on; true rounding follows no knob by more."""
NULLS = 39
"""Searches with signs drawn anew: none is as good by chance in 39 of 40."""
LEAST_R2 = 0.2
"""Ten times what true rounding was seen to follow any knob by."""


class Pursuit(NamedTuple):
    """The knobs that Δ follows best."""

    chosen: tuple[int, ...]
    """Columns, the best first; empty where none is followed."""
    values: tuple[float, ...]
    r2: float
    """In sequences that the choice was not made on: the lesser of both halves. May be below zero."""
    null: float
    """The largest that signs drawn anew gave."""

    @property
    def follows(self) -> bool:
        """Δ follows these knobs by more than chance: whether they are all of it, a proof must tell."""
        return bool(self.chosen) and self.r2 >= LEAST_R2 and self.r2 > self.null


def pursue(
    steps: Floats,
    slopes_NK: Floats,
    groups: NDArray[np.int64],
    bounds: tuple[Floats, Floats],
    rng: np.random.Generator,
) -> Pursuit:
    """`steps` as a sparse combination of the columns of `slopes_NK`; `groups` are the sequences, kept whole.

    `bounds` are those of the value of each column.
    """
    names = rng.permutation(np.unique(groups))
    half = np.isin(groups, names[: len(names) // 2])
    if len(names) < 2:
        return Pursuit((), (), 0.0, 0.0)
    scores = _held_out(steps, slopes_NK, half, bounds)
    count = 0
    while count < len(scores) and scores[count] - (scores[count - 1] if count else 0.0) >= LEAST_GAIN:
        count += 1
    if not count:
        return Pursuit((), (), max(scores[:1], default=0.0), 0.0)
    nulls = []
    for _ in range(NULLS):
        signs = dict(zip(names.tolist(), rng.choice((-1.0, 1.0), len(names)).tolist(), strict=True))
        flipped = steps * np.array([signs[name] for name in groups.tolist()])
        nulls.append(max(_held_out(flipped, slopes_NK, half, bounds, count), default=0.0))
    path = _search(steps, slopes_NK, bounds, count)
    chosen, values = path[-1]
    return Pursuit(tuple(chosen), tuple(values.tolist()), scores[count - 1], max(nulls))


def singles(
    steps: Floats, slopes_NK: Floats, bounds: tuple[Floats, Floats], count: int
) -> list[tuple[int, float]]:
    """The columns that alone fit `steps` best, each with its value; the best first, and of equals the widest."""
    sizes_K, usable_K = _sizes(slopes_NK)
    along_K = (steps.astype(np.float32) @ slopes_NK).astype(np.float64)
    value_K = along_K / sizes_K**2
    possible_K = usable_K & (value_K > bounds[0]) & (value_K < bounds[1])
    fit_K = np.where(possible_K, np.abs(along_K) / sizes_K, -1.0)
    order = np.argsort(-fit_K, kind="stable")[:count]
    return [(int(column), float(value_K[column])) for column in order if possible_K[column]]


def _sizes(slopes_NK: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Lengths of the columns, and which are more than nothing."""
    sizes_K = np.sqrt(np.einsum("nk,nk->k", slopes_NK, slopes_NK, dtype=np.float64))
    usable_K = sizes_K > 1e-6 * max(float(sizes_K.max(initial=0.0)), 1e-30)
    return np.where(usable_K, sizes_K, 1.0), usable_K


def _held_out(
    steps: Floats,
    slopes_NK: Floats,
    half: NDArray[np.bool_],
    bounds: tuple[Floats, Floats],
    most: int = MOST_KNOBS,
) -> list[float]:
    """R² with one knob, two, …, in the half that they were not chosen on; of both halves, the lesser."""
    ways = [
        [
            _r2(steps[~chosen_on], slopes_NK[~chosen_on][:, columns] @ values)
            for columns, values in _search(steps[chosen_on], slopes_NK[chosen_on], bounds, most)
        ]
        for chosen_on in (half, ~half)
    ]
    return [min(pair) for pair in zip(*ways, strict=False)]


def _search(
    steps: Floats, slopes_NK: Floats, bounds: tuple[Floats, Floats], most: int
) -> list[tuple[list[int], Floats]]:
    """The best column, then the best beside it, and so on, each time with all values fitted anew."""
    sizes_K, usable_K = _sizes(slopes_NK)
    found: list[tuple[list[int], Floats]] = []
    chosen: list[int] = []
    left = steps
    for _ in range(most):
        along_K = (left.astype(np.float32) @ slopes_NK).astype(np.float64)
        value_K = along_K / sizes_K**2
        low_K, high_K = bounds
        possible_K = usable_K & (value_K > low_K) & (value_K < high_K)
        possible_K[chosen] = False
        if not possible_K.any():
            break
        fit_K = np.where(possible_K, np.abs(along_K) / sizes_K, -1.0)
        # Equals go to the first: wider knobs come before narrower ones.
        chosen = [*chosen, int(np.flatnonzero(fit_K >= fit_K.max() * (1 - 1e-4))[0])]
        columns = slopes_NK[:, chosen].astype(np.float64)
        values: Floats = np.linalg.lstsq(columns, steps, rcond=None)[0].astype(np.float64)
        found.append((chosen, values))
        left = steps - columns @ values
    return found


def _r2(steps: Floats, predicted: Floats) -> float:
    whole = float((steps**2).sum())
    return 1 - float(((steps - predicted) ** 2).sum()) / whole if whole else 0.0


def alike(slopes_NK: Floats, column: int, least: float = 0.9999) -> Sequence[int]:
    """Columns that no data of these tokens can tell from `column`, that one left out."""
    one = slopes_NK[:, column].astype(np.float64)
    sizes_K = np.sqrt(np.einsum("nk,nk->k", slopes_NK, slopes_NK, dtype=np.float64))
    along_K = np.abs(one.astype(np.float32) @ slopes_NK) / np.maximum(sizes_K * np.sqrt(one @ one), 1e-30)
    return [int(other) for other in np.flatnonzero(along_K >= least) if other != column]
