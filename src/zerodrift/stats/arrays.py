"""What may enter a statistic: finite float64 numbers, at least one of them, in the shape that was promised.

One NaN makes every mean NaN and every comparison false, so a gate that reads "drift > limit" would pass it.
It is refused here, before anything is computed, and never masked, clipped or replaced.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from zerodrift.core.errors import InvalidValue, NonFinite

Floats = npt.NDArray[np.float64]
Reals = npt.NDArray[np.floating[Any]]
"""In the type they were given."""
Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LARGEST_LOG_RATIO = 300.0
"""Nats. Above it the behaviour policy gave e^-300 to a token that it sampled: no sampler does that, and the
square of the ratio times 1e48 tokens would leave float64."""
SMALLEST_LOG_RATIO = -1e4
"""Nats. Logprobs of -9998 and below are refused as hidden NaN where completions are built."""


def finite(name: str, values: npt.ArrayLike) -> Floats:
    """`values` as float64, of any shape but empty."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{name} cannot be read as an array of numbers ({error})") from error
    if array.size == 0:
        raise InvalidValue(f"{name} is empty; a statistic needs at least one value")
    if not np.isfinite(array).all():
        position = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
        where = ", ".join(str(int(index)) for index in position)
        raise NonFinite(
            f"{name}[{where}] is {array[position]}; find the row it came from, never replace the value"
        )
    return array


def vector(name: str, values: npt.ArrayLike) -> Floats:
    """`values` as a one-dimensional float64 array."""
    array = finite(name, values)
    if array.ndim != 1:
        raise InvalidValue(f"{name} has shape {array.shape}; give one number per token, in one dimension")
    return array


def log_ratios(values: npt.ArrayLike) -> Floats:
    """Per-token r = log target - log behaviour, within the range that a sampled token can have."""
    array = vector("log ratios", values)
    for position in (int(array.argmin()), int(array.argmax())):
        if not SMALLEST_LOG_RATIO <= array[position] <= LARGEST_LOG_RATIO:
            raise InvalidValue(
                f"log ratios[{position}] is {array[position]}, outside [{SMALLEST_LOG_RATIO}, {LARGEST_LOG_RATIO}] "
                "nats: one of the two logprobs does not belong to the sampled token"
            )
    return array


def same_shape(first_name: str, first: Floats, second_name: str, second: Floats | Ids) -> None:
    """Two arrays speak of the same tokens."""
    if first.shape != second.shape:
        raise InvalidValue(
            f"{first_name} has shape {first.shape} and {second_name} {second.shape}; "
            "they must have one entry for each of the same tokens"
        )
