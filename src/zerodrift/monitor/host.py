"""Anything that holds numbers, as an array of numpy's: the one place where another framework's tensors are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Bools, Floats


def host(name: str, value: Any) -> NDArray[Any]:
    """`value` as an array of the host: a tensor of any framework, an array, or lists, ragged ones as objects."""
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidValue(
            f"{name} is a masked array, whose mask would be lost; give its data, and mask= beside it"
        )
    for method in ("detach", "float", "cpu"):
        # bf16 has no numpy type, so a tensor is widened before it leaves its framework.
        call = getattr(value, method, None)
        if call is not None and (method != "float" or _is_narrow(value)):
            try:
                value = call()
            except RuntimeError as error:
                raise InvalidValue(f"{name} cannot be copied to the host ({error})") from error
    if isinstance(value, list | tuple) and any(hasattr(row, "detach") for row in value):
        # numpy reads neither bf16 nor what requires a gradient out of a list.
        value = [None if row is None else host(f"{name}[{place}]", row) for place, row in enumerate(value)]
    try:
        return np.asarray(value)
    except ValueError:
        return _ragged(name, value)
    except (TypeError, RuntimeError) as error:
        raise InvalidValue(
            f"{name} cannot be read as an array ({error}); give a tensor, an array or lists"
        ) from error


def _is_narrow(tensor: Any) -> bool:
    """Of a floating type that has fewer bits than float32; one that has more keeps them."""
    kind = str(getattr(tensor, "dtype", "")).rpartition(".")[2]
    return "float" in kind and kind not in {"float32", "float64"}


def _ragged(name: str, rows: Sequence[Any]) -> NDArray[Any]:
    result = np.empty(len(rows), dtype=object)
    for place, row in enumerate(rows):
        result[place] = None if row is None else host(f"{name}[{place}]", row)
    return result


def numbers(name: str, value: Any) -> Floats:
    """All of them, flat and in float64, whatever they lie in."""
    array = host(name, value)
    try:
        if array.dtype == object and array.ndim == 1 and any(hasattr(row, "__len__") for row in array):
            array = np.concatenate([np.ravel(np.asarray(row)) for row in array])
        found: Floats = array.astype(np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{name} cannot be read as numbers ({error})") from error
    return found


def yes_or_no(name: str, array: NDArray[Any]) -> Bools:
    """A mask, of any type that says so: of -100, NaN or a word nobody knows which it is."""
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind not in "fiuO" or not np.isin(array, (0, 1)).all():
        raise InvalidValue(
            f"{name} holds something else than 0 and 1 (type {array.dtype}); say of each token whether it counts"
        )
    chosen: Bools = array.astype(np.bool_)
    return chosen
