import math
from enum import StrEnum

import numpy as np
import pytest

from zerodrift.core import require
from zerodrift.core.errors import InvalidPrompt, InvalidSampling, InvalidValue


class Colour(StrEnum):
    RAW = "raw"


@pytest.mark.parametrize("value", [0, 0.0, 0.5, 1, 1.0])
def test_a_number_in_range(value: float) -> None:
    require.real(InvalidValue, "share", value, "it lies in [0, 1]", 0, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.5", None, 1j])
def test_what_is_no_finite_number(value: object) -> None:
    with pytest.raises(InvalidSampling) as caught:
        require.real(InvalidSampling, "share", value, "say so", 0, 1)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [-1e-300, 1.0000001, 1e300])
def test_a_number_out_of_range(value: float) -> None:
    with pytest.raises(InvalidValue, match=r"^share is .*; it lies in \[0, 1\]$"):
        require.real(InvalidValue, "share", value, "it lies in [0, 1]", 0, 1)


def test_a_range_may_be_open_above() -> None:
    require.real(InvalidValue, "x", 1e300, "", 0)
    require.whole(InvalidValue, "x", 10**30, "", 0)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.int64(1)])
def test_what_is_no_integer(value: object) -> None:
    with pytest.raises(InvalidValue, match=r"n is .*, which is not an integer; count"):
        require.whole(InvalidValue, "n", value, "count", 0)


@pytest.mark.parametrize("value", [-1, 4])
def test_an_integer_out_of_range(value: int) -> None:
    with pytest.raises(InvalidValue, match=f"^n is {value}; count to three$"):
        require.whole(InvalidValue, "n", value, "count to three", 0, 3)


@pytest.mark.parametrize(("value", "kind"), [("a", str), (None, str | None), (True, bool), (3, int)])
def test_an_instance(value: object, kind: type) -> None:
    require.instance(InvalidValue, "x", value, kind)
    require.each(InvalidValue, "xs", (value, value), kind)


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (5, str, "^x is 5; give a str$"),
        (5, str | None, r"^x is 5; give a str \| None$"),
        ("raw", Colour, "^x is 'raw'; give a Colour$"),
    ],
)
def test_what_is_no_instance(value: object, kind: type, says: str) -> None:
    with pytest.raises(InvalidPrompt, match=says):
        require.instance(InvalidPrompt, "x", value, kind)


def test_each_of_a_tuple() -> None:
    with pytest.raises(InvalidValue, match=r"^xs is a list; give a tuple$"):
        require.each(InvalidValue, "xs", [1], int)
    with pytest.raises(InvalidValue, match=r"^xs\[1\] is '2'; give a int"):
        require.each(InvalidValue, "xs", (1, "2"), int)


@pytest.mark.parametrize("ids", [(), (0,), (5, 10**9)])
def test_token_ids(ids: tuple[int, ...]) -> None:
    require.token_ids(InvalidPrompt, "prompt", ids)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1], "prompt is a list"),
        ("ab", "prompt is a str"),
        (None, "prompt is a NoneType"),
        (np.array([1]), "prompt is a ndarray"),
        ((1, -2), r"prompt\[1\] is -2"),
        ((True,), r"prompt\[0\] is True"),
        ((1, 2, 3.0), r"prompt\[2\] is 3.0"),
        ((1, None), r"prompt\[1\] is None"),
    ],
)
def test_what_are_no_token_ids(ids: object, says: str) -> None:
    with pytest.raises(InvalidPrompt, match=says):
        require.token_ids(InvalidPrompt, "prompt", ids)
