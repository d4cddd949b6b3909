import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.sequences import sequence_sums


def test_sums_follow_increasing_ids_however_tokens_are_interleaved():
    assert sequence_sums([1.0, 10.0, 2.0, 20.0], [7, -3, 7, -3]).tolist() == [30.0, 3.0]


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint64])
def test_ids_that_count_sequences_may_leave_some_out(kind):
    assert sequence_sums([1.0, 10.0, 2.0], np.array([2, 0, 2], dtype=kind)).tolist() == [10.0, 3.0]


@pytest.mark.parametrize(("ids", "message"), [([0.0, 1.0], "float64"), ([0, 1, 1], "shape")])
def test_ids_that_do_not_name_each_token_are_refused(ids, message):
    with pytest.raises(InvalidValue, match=message):
        sequence_sums(np.ones(2), ids)
