"""Batches that look healthy because nothing was compared: one array handed in twice, and padding that nobody masked.

A trainer that takes the engine's logprobs for its own (verl's bypass mode does) shows a gap of 0 at every step, whatever the
engine does. And zeros where no token is agree on both sides: with half of a batch padding, every distance is half of what it is.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pairs = frozenset[frozenset[str]]
LEAST_RUN = 2
"""Zeros at an end of a row. One alone is a token that is certain, as an end of text often is."""
LEAST_SHARE = 0.1
"""Of the tokens: what dilutes a mean by as much as a chart resolves."""


def handed_twice(given: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Pairs:
    """Names whose values are one array, or two views of one memory; `arrays` are they on the host."""
    return frozenset(
        frozenset((first, second))
        for first, second in combinations(arrays, 2)
        if given[first] is given[second]
        or _same_place(given[first], given[second])
        or _same_place(arrays[first], arrays[second])
    )


def _same_place(first: Any, second: Any) -> bool:
    place = _place(first)
    return place is not None and place == _place(second)


def _place(value: Any) -> tuple[object, ...] | None:
    """Where numbers lie, and how; None where nobody knows, or there are none."""
    if isinstance(value, np.ndarray):
        return (value.ctypes.data, value.shape, value.strides) if value.size else None
    told = getattr(value, "data_ptr", None)
    return (told(), tuple(value.shape), value.stride()) if told is not None and value.numel() else None


def padding(arrays: Sequence[NDArray[Any]]) -> int:
    """Entries at either end of a row of which every side says exactly 0, where they are more than chance."""
    if len(arrays) < 2 or any(array.ndim != 2 or array.shape != arrays[0].shape for array in arrays):
        return 0
    runs, empty = zip(*(_runs([array[:, ::way] for array in arrays]) for way in (1, -1)), strict=True)
    found = sum(runs) + empty[0]
    return found if found >= LEAST_SHARE * arrays[0].size else 0


def _runs(arrays: Sequence[NDArray[Any]]) -> tuple[int, int]:
    """Entries in runs that rows begin with, and entries of rows that have nothing else, which end as they begin."""
    begins = np.all([array[:, :LEAST_RUN] == 0 for array in arrays], axis=(0, 2))
    if not begins.any() or arrays[0].shape[1] < LEAST_RUN:
        return 0, 0
    other = np.any([array[begins] != 0 for array in arrays], axis=0)
    return int(other.argmax(axis=1).sum()), int((~other.any(axis=1)).sum()) * other.shape[1]
