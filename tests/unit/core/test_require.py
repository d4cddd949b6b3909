import math
from enum import StrEnum

import numpy as np
import pytest

from zerodrift.core import require
from zerodrift.core.errors import InvalidPrompt, InvalidSampling, InvalidValue


class Colour(StrEnum):
    RAW = "raw"


def test_what_is_allowed():
    for value in (0, 0.0, 0.5, 1, 1.0):
        require.real(InvalidValue, "share", value, "it lies in [0, 1]", 0, 1)
    require.real(InvalidValue, "x", 1e300, "", 0)
    require.whole(InvalidValue, "x", 10**30, "", 0)
    for given, kind in (("a", str), (None, str | None), (True, bool), (3, int)):
        require.instance(InvalidValue, "x", given, kind)
        require.each(InvalidValue, "xs", (given, given), kind)
    for ids in ((), (0,), (5, 10**9)):
        require.token_ids(InvalidPrompt, "prompt", ids)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, True, "0.5", None, 1j, -1e-300, 1.0000001, 1e300]
)
def test_what_is_no_number_of_the_range(value):
    with pytest.raises(InvalidSampling) as caught:
        require.real(InvalidSampling, "share", value, "say so", 0, 1)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.int64(1), -1, 4])
def test_what_is_no_integer_of_the_range(value):
    with pytest.raises(InvalidValue):
        require.whole(InvalidValue, "n", value, "count to three", 0, 3)


def test_what_is_no_instance():
    for value, kind in ((5, str), (5, str | None), ("raw", Colour)):
        with pytest.raises(InvalidPrompt):
            require.instance(InvalidPrompt, "x", value, kind)
    for values in ([1], (1, "2")):
        with pytest.raises(InvalidValue):
            require.each(InvalidValue, "xs", values, int)


@pytest.mark.parametrize(
    "ids", [[1], "ab", None, np.array([1]), (1, -2), (True,), (1, 2, 3.0), (1, None)], ids=str
)
def test_what_are_no_token_ids(ids):
    with pytest.raises(InvalidPrompt):
        require.token_ids(InvalidPrompt, "prompt", ids)
