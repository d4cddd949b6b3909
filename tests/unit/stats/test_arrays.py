import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats import arrays


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, None])
def test_a_non_finite_value_is_refused_with_its_position(bad):
    with pytest.raises(NonFinite, match=r"delta\[1\] is"):
        arrays.vector("delta", [0.0, bad, 1.0])


def test_the_position_in_a_row_is_named():
    with pytest.raises(NonFinite, match=r"rows\[1, 0\] is nan"):
        arrays.finite("rows", [[0.0, 1.0], [np.nan, 2.0]])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "is empty"),
        (["a"], "cannot be read"),
        ([[1.0]], "shape"),
        (1.0, "shape"),
        ([[1.0], [1.0, 2.0]], "read"),
    ],
)
def test_what_is_no_vector_is_refused(bad, message):
    with pytest.raises(InvalidValue, match=message):
        arrays.vector("delta", bad)


def test_tuples_and_float32_are_read_as_float64():
    assert arrays.vector("delta", (1, 2.5)).dtype == np.float64
    assert arrays.vector("delta", np.array([0.1], dtype=np.float32))[0] == np.float64(np.float32(0.1))


@pytest.mark.parametrize("bad", [300.1, -10_001.0])
def test_a_log_ratio_no_sampled_token_can_have_is_refused(bad):
    with pytest.raises(InvalidValue, match=r"log ratios\[2\].*does not belong to the sampled token"):
        arrays.log_ratios([0.0, 0.1, bad])


def test_log_ratios_reach_to_the_bounds():
    assert arrays.log_ratios([300.0, -1e4]).tolist() == [300.0, -1e4]
