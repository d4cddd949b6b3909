from typing import Any

import pytest

from zerodrift.core.errors import InvalidCompletion, InvalidValue
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion, check_cover

OLD, NEW = WeightVersion("step-1"), WeightVersion("step-2", "abcd")


def test_a_version_needs_a_name() -> None:
    with pytest.raises(
        InvalidValue, match="needs a non-empty label; use the training step or a digest"
    ) as caught:
        WeightVersion("")
    assert caught.value.code == "value/invalid"


def test_labels_and_digests_are_text() -> None:
    with pytest.raises(InvalidValue, match="label is 7; give a str"):
        WeightVersion(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"digest is 7; give a str \| None"):
        WeightVersion("step-7", 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [VersionSpan, LineageSegment])
def test_a_span_belongs_to_a_version(kind: Any) -> None:
    with pytest.raises(InvalidValue, match="version is 'v'; give a WeightVersion"):
        kind("v", 0, 1)


@pytest.mark.parametrize("kind", [VersionSpan, LineageSegment])
@pytest.mark.parametrize(
    ("start", "end", "says"),
    [
        (-1, 3, "start is -1; it counts"),
        (0, 0, "end is 0; it lies after the start"),
        (4, 3, "end is 3; it lies after the start"),
        (0.0, 3, "start is 0.0, which is not an integer"),
        (0, True, "end is True, which is not an integer"),
        (None, 3, "start is None"),
    ],
)
def test_a_span_covers_something(kind: Any, start: Any, end: Any, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        kind(OLD, start, end)


@pytest.mark.parametrize("kind", [VersionSpan, LineageSegment])
def test_spans_that_cover_everything_once(kind: Any) -> None:
    check_cover((), 0, "spans")
    check_cover((kind(OLD, 0, 5),), 5, "spans")
    check_cover((kind(OLD, 0, 2), kind(NEW, 2, 5)), 5, "spans")


@pytest.mark.parametrize(
    ("bounds", "length", "says"),
    [
        (
            [(0, 3), (2, 5)],
            5,
            "spans leave 3..2 uncovered or twice covered; each token has exactly one version",
        ),
        ([(0, 2), (3, 5)], 5, "spans leave 2..3 uncovered"),
        ([(1, 5)], 5, "spans leave 0..1 uncovered"),
        ([(3, 5), (0, 3)], 5, "spans leave 0..3 uncovered"),
        ([(0, 4)], 5, "spans cover 4 of 5"),
        ([(0, 6)], 5, "spans cover 6 of 5"),
        ([], 5, "spans cover 0 of 5"),
        ([(0, 1)], 0, "spans cover 1 of 0"),
    ],
)
def test_spans_that_do_not(bounds: list[tuple[int, int]], length: int, says: str) -> None:
    spans = tuple(VersionSpan(OLD, start, end) for start, end in bounds)
    with pytest.raises(InvalidCompletion, match=says) as caught:
        check_cover(spans, length, "spans")
    assert caught.value.code == "value/completion"
