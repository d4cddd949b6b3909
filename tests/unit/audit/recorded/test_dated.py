import numpy as np
import pytest

from zerodrift.audit.recorded.dated import dated
from zerodrift.drift.strata import Timeline

ORDER = Timeline("step", (7, 8, 9), np.repeat(np.arange(3), 4))


def flags(*places: int) -> np.ndarray:
    return np.isin(np.arange(12), places)


def test_from_a_step_on():
    known = dated(ORDER, flags(*range(4, 12)), flags(*range(4)), "are old")
    assert known == (8, 2, "since step 8: 8 of 8 rollouts are old, and 4 of 4 before it are the checkpoint's")


def test_from_the_first_step_on():
    known = dated(ORDER, flags(*range(12)), flags(), "are old")
    assert known is not None
    assert known.message == "bad from the first recorded step (7) on: 12 of 12 rollouts are old"


def test_one_that_ended_and_is_mixed():
    known = dated(ORDER, flags(4, 5), flags(0, 1, 2, 3, 6, 7, 8, 9, 10, 11), "are old")
    assert known is not None
    assert (known.first, known.affected) == (8, 1)
    assert known.message.startswith("since step 8, last seen in step 8: 2 of 4 rollouts are old")


@pytest.mark.parametrize(
    ("faulty", "sound"),
    [
        (flags(), flags(*range(12))),
        (flags(4), flags(*range(4))),
        (flags(*range(4, 12)), flags(0, 1)),
    ],
    ids=["none", "a stray", "neither before"],
)
def test_what_cannot_be_dated(faulty, sound):
    assert dated(ORDER, faulty, sound, "are old") is None
