from typing import Any

import pytest

from zerodrift.core.errors import InvalidCompletion, InvalidValue
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion, check_cover

OLD, NEW = WeightVersion("step-1"), WeightVersion("step-2", "abcd")


@pytest.mark.parametrize("fields", [("",), (7,), ("step-7", 7)], ids=str)
def test_a_version_is_a_label_and_perhaps_a_digest(fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidValue) as caught:
        WeightVersion(*fields)
    assert caught.value.code == "value/invalid"


@pytest.mark.parametrize("kind", [VersionSpan, LineageSegment])
@pytest.mark.parametrize(
    "fields",
    [("v", 0, 1), (OLD, -1, 3), (OLD, 0, 0), (OLD, 4, 3), (OLD, 0.0, 3), (OLD, 0, True), (OLD, None, 3)],
    ids=str,
)
def test_a_span_belongs_to_a_version_and_covers_something(kind: Any, fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidValue):
        kind(*fields)


@pytest.mark.parametrize("kind", [VersionSpan, LineageSegment])
def test_spans_that_cover_everything_once(kind: Any) -> None:
    check_cover((), 0, "spans")
    check_cover((kind(OLD, 0, 5),), 5, "spans")
    check_cover((kind(OLD, 0, 2), kind(NEW, 2, 5)), 5, "spans")


@pytest.mark.parametrize(
    ("bounds", "length", "named"),
    [
        ([(0, 3), (2, 5)], 5, "3..2"),
        ([(0, 2), (3, 5)], 5, "2..3"),
        ([(1, 5)], 5, "0..1"),
        ([(3, 5), (0, 3)], 5, "0..3"),
        ([(0, 4)], 5, "4 of 5"),
        ([(0, 6)], 5, "6 of 5"),
        ([], 5, "0 of 5"),
        ([(0, 1)], 0, "1 of 0"),
    ],
)
def test_spans_that_do_not(bounds: list[tuple[int, int]], length: int, named: str) -> None:
    spans = tuple(VersionSpan(OLD, start, end) for start, end in bounds)
    with pytest.raises(InvalidCompletion) as caught:
        check_cover(spans, length, "spans")
    assert named in str(caught.value)
