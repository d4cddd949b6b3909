"""Anything that holds numbers, as an array of numpy's: the one place where another framework's tensors are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerodrift.core.errors import InvalidValue


def host(name: str, value: Any) -> NDArray[Any]:
    """`value` as an array of the host: a tensor of any framework, an array, or lists, ragged ones as objects."""
    for method in ("detach", "float", "cpu"):
        # bf16 has no numpy type, so a tensor is widened before it leaves its framework.
        call = getattr(value, method, None)
        if call is not None and (method != "float" or "float" in str(getattr(value, "dtype", ""))):
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


def _ragged(name: str, rows: Sequence[Any]) -> NDArray[Any]:
    result = np.empty(len(rows), dtype=object)
    for place, row in enumerate(rows):
        result[place] = None if row is None else host(f"{name}[{place}]", row)
    return result
