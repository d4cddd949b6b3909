"""Server-sent events over a real socket: split anywhere, broken off, too slow, too large."""

import contextlib
import json
import time

import pytest

from zerodrift.backends import http
from zerodrift.backends.http import HttpClient
from zerodrift.core.errors import BadAnswer, EngineError, EngineRefused, EngineUnreachable

DONE = b"data: [DONE]\n\n"


@pytest.fixture
def client(loopback, closing):
    return closing(HttpClient(loopback.url, timeout_s=5))


def event(document):
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def streaming(*parts, pause_s=0.0, end=b"0\r\n\r\n", media="text/event-stream; charset=utf-8"):
    """Each part is a chunk, and a packet, of its own."""

    def answer(call, handler):
        handler.send_response(200)
        handler.send_header("content-type", media)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for part in parts:
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                handler.wfile.flush()
                time.sleep(pause_s)
            handler.wfile.write(end)
        handler.close_connection = True

    return answer


GREETING = {"text": "Grüße 😀\u2028"}
SPLIT = event(GREETING).replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "documents", "done"),
    [
        ([event({"a": 1}), b": ping\n\n", event({"a": 2}) + DONE], [{"a": 1}, {"a": 2}], True),
        ([event({"a": 1})], [{"a": 1}], False),
        ([SPLIT[place : place + 1] for place in range(len(SPLIT))], [GREETING], True),
    ],
    ids=["whole", "without a last word", "split anywhere"],
)
def test_events_are_read_to_the_end(loopback, client, parts, documents, done):
    loopback.routes["POST /x"] = streaming(*parts)

    assert client.stream("/x", {"stream": True}) == (documents, done)
    assert loopback.calls[0].body == {"stream": True}


def test_no_connection_is_used_again_behind_a_stream(loopback, client):
    """llama.cpp promises to keep it, and closes it: a call that follows at once would find nobody there."""

    def promising(call, handler):
        handler.stream([event({"a": 1}), DONE])
        assert handler.headers["connection"] == "close"

    loopback.routes["POST /x"] = promising
    for _ in range(20):
        assert client.stream("/x", {}).done
    assert client.find("/nowhere") is None


@pytest.mark.parametrize("status", [400, 401, 404, 500, 503])
def test_an_error_before_the_stream_reads_like_any_other(loopback, client, status):
    loopback.routes["POST /x"] = lambda call, handler: (status, {"error": {"message": "too long"}})

    with pytest.raises(EngineError) as caught:
        client.stream("/x", {})
    with pytest.raises(EngineError) as whole:
        client.post("/x", {})
    assert (type(caught.value), str(caught.value)) == (type(whole.value), str(whole.value))


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"error": {"message": "boom", "code": 400}}, EngineRefused),
        ({"error": {"message": "boom", "code": 500}}, EngineError),
        ({"error": "boom", "error_type": "overloaded"}, EngineError),
    ],
)
def test_an_error_inside_the_stream(loopback, client, document, error):
    loopback.routes["POST /x"] = streaming(event({"a": 1}), event(document), DONE)

    with pytest.raises(EngineError) as caught:
        client.stream("/x", {})
    assert type(caught.value) is error
    assert "boom" in str(caught.value)


@pytest.mark.parametrize("data", [b"{", b"hello", b"[DONE]", b"7", b"[1]"])
def test_an_event_that_is_no_object(loopback, client, data):
    loopback.routes["POST /x"] = streaming(b"data: " + data + b"\n\n", event({"a": 1}), DONE)

    with pytest.raises(BadAnswer):
        client.stream("/x", {})


def test_a_server_that_does_not_stream(loopback, client):
    loopback.routes["POST /x"] = lambda call, handler: handler.send(
        200, {"choices": []}, content_type="application/json"
    )
    with pytest.raises(BadAnswer):
        client.stream("/x", {})
    loopback.routes["POST /x"] = lambda call, handler: (200, {})
    with pytest.raises(BadAnswer):
        client.stream("/x", {})


def test_a_stream_that_is_broken_off(loopback, client):
    loopback.routes["POST /x"] = streaming(event({"a": 1}), end=b"")
    with pytest.raises(EngineUnreachable):
        client.stream("/x", {})
    loopback.routes["POST /x"] = streaming(event({"a": 1}), b'data: {"a": ')
    with pytest.raises(EngineUnreachable):
        client.stream("/x", {})


def silent_after_one(call, handler):
    """Half-closed: the head and an event came, the connection stays, and nothing more is said."""
    streaming(event({"a": 1}), end=b"")(call, handler)
    time.sleep(1.5)


@pytest.mark.parametrize(
    "answer",
    [
        silent_after_one,
        streaming(*[b": ping\n\n"] * 100, pause_s=0.05),
        streaming(*[event({"a": 1})] * 100, pause_s=0.05),
    ],
    ids=["silence", "a trickle of comments", "a trickle of events"],
)
def test_a_stream_that_does_not_end_is_not_waited_for(loopback, answer):
    loopback.routes["POST /x"] = answer
    begin = time.monotonic()

    with (
        contextlib.closing(HttpClient(loopback.url, timeout_s=0.3)) as client,
        pytest.raises(EngineUnreachable),
    ):
        client.stream("/x", {})

    assert time.monotonic() - begin < 1.2


def test_size_is_bounded(loopback, client, monkeypatch):
    monkeypatch.setattr(http, "MOST_BYTES", 2**20)
    loopback.routes["POST /x"] = streaming(*[event({"text": "x" * 100_000})] * 20)

    with pytest.raises(BadAnswer):
        client.stream("/x", {})
