import numpy as np
import pytest

from zerodrift.audit.recorded.dated import by_line, dated, parted
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


def test_a_fault_that_begins_within_a_block_of_lines():
    """Blocks of four lines from line 7 on; from the third line of the second block on all are faulty."""
    blocks, faulty = ORDER._replace(unit="line", labels=(7, 11, 15)), flags(*range(6, 12))
    known = dated(by_line(blocks, range(7, 19), faulty), faulty, ~faulty, "are old")
    assert known is not None
    assert (
        known.message == "since line 13: 6 of 6 rollouts are old, and 6 of 6 before it are the checkpoint's"
    )


@pytest.mark.parametrize(
    ("order", "faulty"),
    [(ORDER, flags(*range(6, 12))), (ORDER._replace(unit="line"), flags(1, 3, 5, 7, 9)), (ORDER, flags())],
    ids=["steps", "one replica of two", "none"],
)
def test_blocks_stay_where_no_line_parts_them(order, faulty):
    assert by_line(order, range(12), faulty) is order


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


@pytest.mark.parametrize(
    ("faulty", "told"),
    [
        (flags(*range(4, 8)), True),
        (flags(*range(8, 12)), True),
        (flags(*range(4, 7)), False),
        (flags(*range(4), *range(8, 12)), False),
        (flags(), False),
        (flags(*range(12)), True),
    ],
    ids=["one step", "the last one", "most of a step", "two, and a sound one between", "none", "three steps"],
)
def test_steps_that_are_parted(faulty, told):
    padding = np.zeros(36, dtype=bool)
    order = Timeline("step", tuple(range(12)), np.repeat(np.arange(12), 4))
    faulty = np.concatenate([faulty, padding])
    assert parted(order, faulty, ~faulty) is told
    unclear = faulty.copy()
    unclear[-1] = True
    assert not parted(order, faulty, ~unclear), "one that is neither"


def test_two_of_four_are_parted_by_chance():
    order = Timeline("step", (0, 1), np.array([0, 0, 1, 1]))
    faulty = np.array([False, False, True, True])
    assert not parted(order, faulty, ~faulty)
