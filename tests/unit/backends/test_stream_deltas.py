"""Pieces by hand: what joins them must lose nothing, and must not mend what the server lost."""

from typing import Any

import pytest

from zerodrift.backends.http import Stream
from zerodrift.backends.stream_deltas import Joined, Streaming, has_tokens, join
from zerodrift.core.errors import BadAnswer, EngineUnreachable

OPENAI = Streaming(
    samples="choices",
    index="index",
    lists=("ids", "lp/values"),
    text="text",
    finish="end",
)
NATIVE = Streaming(lists=("ids",), text="text", finish="end", done=False)
WHOLE_SO_FAR = Streaming(lists=("ids",), text="text", finish="end", cumulative=True)


def chunk(index: Any, ids: list[int], end: str | None = None, **more: Any) -> dict[str, Any]:
    values = [-float(each) for each in ids]
    piece = {"index": index, "ids": ids, "text": f"<{ids}>", "lp": {"values": values}, "end": end, **more}
    return {"id": "x", "choices": [piece], "usage": None}


def joined(documents: list[dict[str, Any]], how: Streaming = OPENAI, *, done: bool = True) -> Joined:
    return join(Stream(documents, done), how, "/route")


def test_samples_are_told_apart_and_come_in_order():
    usage = {"choices": [], "usage": {"cached": 3}}
    answer, pieces = joined(
        [chunk(1, [5]), chunk(0, [1, 2]), chunk(1, [], "stop"), chunk(0, [3], "length"), usage]
    )
    assert pieces == 3, "the end of a sample brought no tokens"
    assert answer == {
        "id": "x",
        "usage": {"cached": 3},
        "choices": [
            {"index": 0, "ids": [1, 2, 3], "text": "<[1, 2]><[3]>", "lp": {"values": [-1.0, -2.0, -3.0]}, "end": "length"},
            {"index": 1, "ids": [5], "text": "<[5]><[]>", "lp": {"values": [-5.0]}, "end": "stop"},
        ],
    }  # fmt: skip


def test_what_is_said_once_is_kept():
    answer: Any = joined([chunk(0, [1], prompt=[7, 8]), chunk(0, [2], "stop", prompt=None)]).answer
    assert answer["choices"][0]["prompt"] == [7, 8]


def test_what_is_lost_stays_lost():
    first, second = chunk(0, [1]), chunk(0, [2], "stop")
    first["choices"][0]["lp"] = None
    answer: Any = joined([first, second]).answer
    assert answer["choices"][0]["lp"] == {"values": [-2.0]}, "one logprob for two tokens"
    second["choices"][0]["lp"] = None
    answer = joined([first, second]).answer
    assert "lp" not in answer["choices"][0]


def test_a_server_without_samples_in_a_list():
    answer, pieces = joined(
        [{"ids": [1], "text": "a"}, {"ids": [], "text": "", "end": "eos", "n": 1}], NATIVE
    )
    assert (answer, pieces) == ({"ids": [1], "text": "a", "end": "eos", "n": 1}, 1)


def test_everything_so_far():
    pieces = [
        {"ids": [1], "text": "a"},
        {"ids": [1, 2], "text": "ab"},
        {"ids": [1, 2], "text": "ab", "end": "x"},
    ]
    assert joined(pieces, WHOLE_SO_FAR) == ({"ids": [1, 2], "text": "ab", "end": "x"}, 2)


@pytest.mark.parametrize(
    ("documents", "how"),
    [
        *(([{"ids": [1, 2]}, {"ids": ids, "end": "x"}], WHOLE_SO_FAR) for ids in ([2, 3], [1], [])),
        ([chunk(0, [1], "stop"), chunk(0, [1], "stop")], OPENAI),
        *(([chunk(index, [1], "stop")], OPENAI) for index in (None, "0", True)),
        ([{"ids": 7, "end": "x"}], NATIVE),
        ([], OPENAI),
        ([{"choices": []}], OPENAI),
        ([chunk(0, [1], "stop"), chunk(1, [1])], OPENAI),
    ],
)
def test_pieces_that_cannot_be_joined(documents, how):
    with pytest.raises(BadAnswer):
        joined(documents, how)


def test_a_stream_without_its_end():
    with pytest.raises(EngineUnreachable):
        joined([chunk(0, [1], "stop")], done=False)
    with pytest.raises(EngineUnreachable):
        joined([{"ids": [1]}], NATIVE)


def test_whether_there_are_tokens_at_all():
    """Not whether they are right: that is for a probe to say."""
    assert has_tokens(Stream([chunk(0, [1])], done=False), OPENAI, "/route")
    assert not has_tokens(Stream([chunk(0, [])], done=True), OPENAI, "/route")
    assert not has_tokens(Stream([{"choices": [{"text": "a"}]}], done=True), OPENAI, "/route")
