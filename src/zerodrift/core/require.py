"""Checks shared by the value types: each names the field, the value and the rule.

`math.isfinite` and `isinstance` are spelt out once here so that no constructor forgets that NaN compares false
with everything, and that `True` is an int.
"""

import math
from enum import StrEnum
from types import UnionType
from typing import TypeVar

from zerodrift.core.errors import InvalidValue

Choice = TypeVar("Choice", bound=StrEnum)


def real(
    error: type[InvalidValue], name: str, value: object, rule: str, low: float, high: float = math.inf
) -> None:
    """`value` is a finite number in [low, high]; `rule` says the same in words, with what to do."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise error(f"{name} is {value!r}, which is not a finite number; {rule}")
    if not low <= value <= high:
        raise error(f"{name} is {value!r}; {rule}")


def whole(
    error: type[InvalidValue], name: str, value: object, rule: str, low: int, high: int | None = None
) -> None:
    """`value` is an int (never a bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{name} is {value!r}, which is not an integer; {rule}")
    if value < low or (high is not None and value > high):
        raise error(f"{name} is {value!r}; {rule}")


def instance(error: type[InvalidValue], name: str, value: object, kind: type | UnionType) -> None:
    """`value` is a `kind`: annotations are checked by decoders only, and constructors are open to anybody."""
    if not isinstance(value, kind):
        raise error(f"{name} is {value!r}; give a {kind.__name__ if isinstance(kind, type) else kind}")


def a_tuple(error: type[InvalidValue], name: str, values: object) -> tuple[object, ...]:
    """`values`, which is a tuple: nobody can change what a frozen value holds."""
    if not isinstance(values, tuple):
        raise error(f"{name} is a {type(values).__name__}; give a tuple")
    return values


def each(error: type[InvalidValue], name: str, values: object, kind: type | UnionType) -> None:
    """`values` is a tuple of `kind`."""
    for position, value in enumerate(a_tuple(error, name, values)):
        instance(error, f"{name}[{position}]", value, kind)


def token_ids(error: type[InvalidValue], name: str, ids: object) -> None:
    """`ids` is a tuple of non-negative ints; whether the model has them is the model's question."""
    if not isinstance(ids, tuple):
        raise error(
            f"{name} is a {type(ids).__name__}; token ids travel as a tuple of ints (of an array: .tolist())"
        )
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise error(f"{name}[{position}] is {token!r}; a token id is a non-negative int")


def one_of(choices: type[Choice], name: str, value: str) -> Choice:
    """A word of a user as one of `choices`."""
    try:
        return choices(value)
    except ValueError:
        raise InvalidValue(f"{name} is {value!r:.80}; use one of {', '.join(choices)}") from None
