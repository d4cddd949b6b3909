import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.sequences import ids_of, sequence_sums


def test_ids_of_sequences_laid_end_to_end() -> None:
    assert ids_of((2, 3)).tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("bad", [(), (1.5,), ((1, 2),), 3])
def test_lengths_that_are_no_counts_are_refused(bad: object) -> None:
    with pytest.raises(InvalidValue, match="whole numbers"):
        ids_of(bad)  # type: ignore[arg-type]


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"lengths\[1\] is 0"):
        ids_of((2, 0))


def test_sums_follow_increasing_ids_however_tokens_are_interleaved() -> None:
    assert sequence_sums([1.0, 10.0, 2.0, 20.0], [7, -3, 7, -3]).tolist() == [30.0, 3.0]


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint64])
def test_ids_that_count_sequences_may_leave_some_out(kind: type[np.integer]) -> None:
    assert sequence_sums([1.0, 10.0, 2.0], np.array([2, 0, 2], dtype=kind)).tolist() == [10.0, 3.0]


@pytest.mark.parametrize(("ids", "message"), [([0.0, 1.0], "float64"), ([0, 1, 1], "shape")])
def test_ids_that_do_not_name_each_token_are_refused(ids: list[float], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        sequence_sums(np.ones(2), ids)
