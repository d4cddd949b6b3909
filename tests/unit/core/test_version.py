import pytest

from zerodrift.core.errors import InvalidCompletion, InvalidValue
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion, check_cover

OLD, NEW = WeightVersion("step-1"), WeightVersion("step-2", "abcd")


@pytest.mark.parametrize("fields", [("",), (7,), ("step-7", 7)], ids=str)
def test_a_version_is_a_label_and_perhaps_a_digest(fields):
    with pytest.raises(InvalidValue) as caught:
        WeightVersion(*fields)
    assert caught.value.code == "value/invalid"


@pytest.mark.parametrize("kind", [VersionSpan, LineageSegment])
@pytest.mark.parametrize(
    "fields",
    [("v", 0, 1), (OLD, -1, 3), (OLD, 0, 0), (OLD, 4, 3), (OLD, 0.0, 3), (OLD, 0, True), (OLD, None, 3)],
    ids=str,
)
def test_a_span_belongs_to_a_version_and_covers_something(kind, fields):
    with pytest.raises(InvalidValue):
        kind(*fields)


@pytest.mark.parametrize(
    ("bounds", "length"),
    [([], 0), ([(0, 5)], 5), ([(0, 2), (2, 5)], 5)],
)
@pytest.mark.parametrize("kind", [VersionSpan, LineageSegment])
def test_spans_that_cover_everything_once(kind, bounds, length):
    spans = tuple(kind(OLD, start, end) for start, end in bounds)
    check_cover(spans, length, "spans")
    for wrong in (spans[1:], spans[::-1], (*spans, *spans), (*spans, kind(NEW, length + 1, length + 2))):
        if wrong != spans:
            with pytest.raises(InvalidCompletion):
                check_cover(wrong, length, "spans")
    with pytest.raises(InvalidCompletion):
        check_cover(spans, length + 1, "spans")
