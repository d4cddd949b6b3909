import json

import pytest

from zerodrift.backends.sse import Events, read

LINE_ENDS = ["\n", "\r", "\r\n"]


@pytest.mark.parametrize("end", LINE_ENDS, ids=["LF", "CR", "CRLF"])
def test_events_end_with_an_empty_line(end):
    stream = f"data: a{end}{end}data: b{end}{end}data: [DONE]{end}{end}"
    assert read(stream.encode()) == Events(["a", "b", "[DONE]"], cut_off=False)


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        ("data:a\n\n", ["a"]),
        ("data:  a \n\n", [" a "]),
        ("data: a\ndata: b\n\n", ["a\nb"]),
        ("data\n\n", [""]),
        (": ping - 12:00\n\ndata: a\n\n: ping\n\n", ["a"]),
        ("event: token\nid: 7\nretry: 10\ndata: a\n\n", ["a"]),
        ("event: ping\n\ndata: a\n\n", ["a"]),
        ("\n\n\ndata: a\n\n\n\n", ["a"]),
        ("\ufeffdata: a\n\n", ["a"]),
        ("database: x\n\n data: y\n\n", []),
        ("", []),
    ],
    ids=[
        "no space",
        "one space is dropped",
        "lines are joined",
        "no colon",
        "comments",
        "other fields",
        "no data",
        "empty lines",
        "byte order mark",
        "other names",
        "nothing",
    ],
)
def test_the_standard(stream, data):
    assert read(stream.encode()) == Events(data, cut_off=False)


@pytest.mark.parametrize(
    "stream", ["data: a\n\ndata: b\n", "data: a\n\ndata: b", "data: a\n\nda", "data: a\n"]
)
def test_an_event_that_is_cut_off_is_told(stream):
    events = read(stream.encode())
    assert events.cut_off
    assert "b" not in events.data


def test_a_comment_at_the_end_cuts_nothing_off():
    assert read(b"data: a\n\n: ping") == Events(["a"], cut_off=False)


@pytest.mark.parametrize("strange", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_nothing_else_ends_a_line(strange):
    """JSON may carry these as they are, and `str.splitlines` cuts there."""
    document = json.dumps({"text": strange}, ensure_ascii=False)
    assert read(f"data: {document}\n\n".encode()).data == [document]


def test_half_a_character_spoils_no_number():
    body = b'data: {"token_ids": [7], "text": "\xf0\x9f\x98"}\n\n'
    [data] = read(body).data
    assert json.loads(data)["token_ids"] == [7]
