"""Single numbers that a call is given, of whatever kind: Python's own, numpy's, tensors of one."""

import operator
from typing import Any

from zerodrift.core.errors import InvalidValue


def counted(name: str, value: Any, least: int = 0) -> int:
    """A whole number of any kind as Python's own: a state in JSON knows no other."""
    # True is an integer to Python, and a list of one to numpy's older self; neither is a count.
    plain = "bool" not in str(getattr(value, "dtype", type(value))) and not getattr(value, "ndim", None)
    try:
        found = operator.index(value) if plain else None
    except (TypeError, RuntimeError):
        found = None
    if found is None or not least <= found < 2**63:
        raise InvalidValue(f"{name} is {value!r}; it is a whole number, and counts from {least}")
    return found


def number(name: str, value: Any) -> float:
    """One number, also out of a tensor of one; what is not finite is judged, not refused."""
    try:
        found = None if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None:
        raise InvalidValue(f"{name} is {value!r:.80}; give one number")
    return found
