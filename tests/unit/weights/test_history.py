"""The history checker: silent about a history that keeps its promises, and every broken one is seen."""

import msgspec
import pytest

from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion
from zerodrift.weights.history import (
    Accepted,
    Alone,
    AnyEvent,
    Committed,
    Dropped,
    Ended,
    Finished,
    Logged,
    Private,
    Published,
    Recomputed,
    Refused,
    Restarted,
    Sized,
    Stepped,
    violations,
)

A, B, C = (WeightVersion(name, name * 64) for name in "abc")
BITS = ((5, "0x1p-1"), (6, "0x1p-2"), (7, "0x1p-3"))


# Four prompt and three output tokens, over which B was published with KV kept.
ENDED = Ended(
    request="r",
    bits=BITS,
    prompt_length=4,
    versions=(VersionSpan(A, 0, 1), VersionSpan(B, 1, 3)),
    lineage=(LineageSegment(A, 0, 4), LineageSegment(B, 4, 6)),
)
SOUND: list[AnyEvent] = [
    Committed(version=A),
    Published(version=A, follows=None, kv=None),
    Stepped(version=A, digest=A.digest),
    Committed(version=B),
    Refused(code="update/conflict"),
    Stepped(version=A, digest=None),
    Published(version=B, follows="a", kv="keep", in_flight=("r",)),
    Stepped(version=B, digest=B.digest),
    ENDED,
    Recomputed(request="r", bits=BITS),
    Alone(request="r", bits=BITS),
    Sized(what="kept versions", value=2, cap=2),
    Restarted(version=B),
    Published(version=A, follows="b", kv="drain"),
    Dropped(label="b"),
    Stepped(version=A, digest=A.digest),
    Private(what="the admin token", text="not-to-be-told"),
    Accepted(request="s"),
    Accepted(request="t"),
    Logged(text="POST /v1/completions 200"),
    Finished(request="s", how="aborted"),
    Finished(request="t", how="complete"),
]


def test_a_history_that_keeps_its_promises() -> None:
    assert violations(SOUND) == []
    assert violations([]) == []


def replaced(place: int, event: AnyEvent | None) -> list[AnyEvent]:
    return [*SOUND[:place], *([] if event is None else [event]), *SOUND[place + 1 :]]


def ended(**fields: object) -> AnyEvent:
    return msgspec.structs.replace(ENDED, **fields)


OTHER = (*BITS[:2], (7, "0x1.000001p-3"))
STALE = (LineageSegment(C, 0, 4), LineageSegment(B, 4, 6))
BROKEN: dict[str, tuple[list[AnyEvent], str, int]] = {
    "a bit off": (replaced(9, Recomputed(request="r", bits=OTHER)), "I1", 9),
    "scored, never served": (replaced(9, Recomputed(request="s", bits=BITS)), "I1", 9),
    "twice": ([*SOUND, ENDED], "I1", len(SOUND)),
    "nobody told its end": (replaced(20, None), "I5", len(SOUND) - 2),
    "ended twice": ([*SOUND, Finished(request="s", how="error")], "I5", len(SOUND)),
    "complete, and never accepted": (
        [*SOUND, Finished(request="u", how="complete")],
        "I5",
        len(SOUND),
    ),
    "one name, two requests": (
        [*SOUND, Accepted(request="s"), Finished(request="s", how="error")],
        "I5",
        len(SOUND),
    ),
    "a token in the log": (replaced(19, Logged(text="refused Bearer not-to-be-told")), "I9", 19),
    "a token of nobody": (replaced(8, ended(versions=(VersionSpan(C, 0, 3),))), "I1", 8),
    "a label with another digest": (
        replaced(8, ended(versions=(VersionSpan(A, 0, 1), VersionSpan(WeightVersion("b", "x"), 1, 3)))),
        "I1",
        8,
    ),
    "a token without a version": (
        replaced(8, ended(versions=(VersionSpan(A, 0, 1), VersionSpan(B, 1, 2)))),
        "I1",
        8,
    ),
    "published, not committed": (replaced(3, None), "I2", 5),
    "published after it was dropped": (replaced(5, Dropped(label="b")), "I2", 6),
    "a step on the next version": (replaced(5, Stepped(version=B, digest=None)), "I2", 5),
    "a step on the old version": (replaced(7, Stepped(version=A, digest=None)), "I2", 7),
    "a mixture": (replaced(5, Stepped(version=A, digest="mixed")), "I2", 5),
    "an older one after a restart": (replaced(12, Restarted(version=A)), "I2", 12),
    "dropped while it serves": (replaced(5, Dropped(label="a")), "I2", 5),
    "KV of nobody's version": (replaced(8, ended(lineage=STALE)), "I3", 8),
    "kept, and nobody asked for it": (
        replaced(6, Published(version=B, follows="a", kv="recompute", in_flight=("r",))),
        "I3",
        8,
    ),
    "kept for another request": (
        replaced(6, Published(version=B, follows="a", kv="keep", in_flight=("s",))),
        "I3",
        8,
    ),
    "KV that is not accounted for": (replaced(8, ended(lineage=())), "I3", 8),
    "drained, and somebody was there": (
        replaced(13, Published(version=A, follows="b", kv="drain", in_flight=("t",))),
        "I3",
        13,
    ),
    "in place of another": (
        replaced(6, Published(version=B, follows="c", kv="keep", in_flight=("r",))),
        "I4",
        6,
    ),
    "a replay": (replaced(12, Published(version=B, follows="a", kv=None)), "I4", 12),
    "committed twice": (replaced(4, Committed(version=B)), "I4", 4),
    "a label of one that served": ([*SOUND, Committed(version=WeightVersion("b", "x"))], "I4", len(SOUND)),
    "other bits alone": (replaced(10, Alone(request="r", bits=OTHER)), "I7", 10),
    "too many": (replaced(11, Sized(what="kept versions", value=3, cap=2)), "I8", 11),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_promise_is_seen_where_it_broke(kind: str) -> None:
    events, invariant, place = BROKEN[kind]
    first = violations(events)[0]
    assert (first.invariant, first.place) == (invariant, place)


def test_every_invariant_has_a_history_that_breaks_it() -> None:
    assert {invariant for _, invariant, _ in BROKEN.values()} == {
        *("I1", "I2", "I3", "I4", "I5"),
        *("I7", "I8", "I9"),
    }


def test_a_history_can_be_written_down() -> None:
    read = msgspec.json.decode(msgspec.json.encode(SOUND), type=list[AnyEvent])
    assert read == SOUND
