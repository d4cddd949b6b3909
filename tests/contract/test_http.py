import threading
import time

import pytest

from zerodrift.backends import http
from zerodrift.backends.http import ATTEMPTS, HttpClient
from zerodrift.core.errors import (
    BadAnswer,
    ConfigError,
    EngineError,
    EngineRefused,
    EngineUnreachable,
)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def connect(closing):
    return lambda url, **options: closing(HttpClient(url, **options))


@pytest.fixture
def client(loopback, connect):
    return connect(loopback.url, timeout_s=5, concurrency=4)


def answering(status, answer, **headers):
    return lambda call, handler: handler.send(status, answer, **headers)


def test_json_travels_both_ways(loopback, client, connect):
    loopback.routes["POST /echo"] = lambda call, handler: (200, call.body)
    loopback.routes["GET /here"] = answering(200, {"a": 1})
    loopback.routes["POST /done"] = answering(200, b"")
    loopback.routes["GET /behind/gateway/x"] = answering(200, 1)

    assert client.post("/echo", {"ids": (1, 2), "t": 0.1}) == {"ids": [1, 2], "t": 0.1}
    assert client.get("/here") == {"a": 1}
    assert client.find("/here") == {"a": 1}
    assert client.post("/done", None) is None
    assert connect(f"{loopback.url}/behind/gateway/").get("/x") == 1
    assert client.find("/nowhere") is None
    assert loopback.calls[0].headers["content-type"] == "application/json"
    assert "authorization" not in loopback.calls[0].headers


def test_nan_is_read_rather_than_called_garbage(loopback, client):
    loopback.routes["GET /x"] = answering(200, b'{"logprob": NaN, "other": -Infinity}')

    answer = client.get("/x")

    assert answer["logprob"] != answer["logprob"]
    assert answer["other"] == float("-inf")


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[" * 100_000, b"\xff\xfe\x00", b'{"a": 1'])
def test_what_is_not_json_is_a_bad_answer(loopback, client, body):
    loopback.routes["GET /x"] = answering(200, body)

    with pytest.raises(BadAnswer):
        client.get("/x")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *((status, EngineRefused) for status in (302, 400, 401, 403, 404, 422)),
        *((status, EngineError) for status in (500, 501)),
        *((status, EngineUnreachable) for status in (502, 503)),
    ],
)
def test_each_status_has_its_error_with_the_servers_words(loopback, client, status, error):
    loopback.routes["POST /x"] = answering(status, {"error": {"message": "too long", "code": status}})

    with pytest.raises(EngineError) as caught:
        client.post("/x", {})

    assert type(caught.value) is error
    assert "too long" in str(caught.value)
    assert len(loopback.calls) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": {"message": "deep"}}, "400: deep"),
        ({"message": "flat"}, "400: flat"),
        ({"detail": [{"loc": "seed"}]}, '"loc": "seed"'),
        (["odd"], "odd"),
        (b"plain words", "plain words"),
        (b"[" * 100_000, r"\[\["),
    ],
)
def test_the_servers_message_is_found_in_every_shape(loopback, client, body, words):
    loopback.routes["POST /x"] = answering(400, body)

    with pytest.raises(EngineRefused, match=words) as caught:
        client.post("/x", {})

    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("wait", ["0", "0.01", "Wed, 21 Oct 2026 07:28:00 GMT", "nan", "-3", None])
def test_a_busy_server_is_asked_again(loopback, client, wait):
    headers = {} if wait is None else {"retry_after": wait}

    def busy_twice(call, handler):
        if len(loopback.calls) <= 2:
            return handler.send(429, {"error": "busy"}, **headers)
        return 200, "done"

    loopback.routes["POST /x"] = busy_twice

    assert client.post("/x", {}) == "done"
    assert len(loopback.calls) == 3


@pytest.mark.parametrize(
    ("retry_after", "calls", "said"),
    [
        ("0", ATTEMPTS, "0 s; "),
        ("20", 1, "20 s"),
        ("3600", 1, "3600 s"),
        ("45.5", 1, "45.5 s"),
        ("Wed, 21 Oct 2026 07:28:00 GMT", ATTEMPTS, "Wed, 21 Oct 2026 07:28:00 GMT"),
        ("nan", ATTEMPTS, None),
        ("-5", ATTEMPTS, None),
    ],
)
def test_a_server_that_stays_busy_is_reported_and_not_waited_for(loopback, client, retry_after, calls, said):
    """Nobody waits longer than the timeout, which is five seconds here, or half a minute."""
    loopback.routes["POST /x"] = answering(429, {"error": "busy"}, retry_after=retry_after)
    begin = time.monotonic()

    with pytest.raises(EngineRefused) as caught:
        client.post("/x", {})

    assert len(loopback.calls) == calls
    assert "--set engine.concurrency=N" in str(caught.value)
    assert (said or "") in str(caught.value)
    assert said or retry_after not in str(caught.value)
    assert time.monotonic() - begin < 2


SECRET = "https://me:hunter2@login.example/start?token=hunter2#hunter2"


@pytest.mark.parametrize(
    ("status", "there", "said"),
    [
        *((status, SECRET, "https://login.example/start,") for status in (301, 302, 303, 307, 308)),
        *((302, there, "") for there in ("/y", "http://[x", "//", "http://h:port/")),
        *((302, there, "without saying where to") for there in ("", "?a=b")),
    ],
)
def test_a_redirect_is_not_followed_and_says_where_it_leads(loopback, client, status, there, said):
    loopback.routes["POST /x"] = answering(status, {}, location=there)

    with pytest.raises(EngineRefused if said else EngineError) as caught:
        client.post("/x", {})

    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert len(loopback.calls) == 1


def half_a_body(call, handler):
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def no_http(call, handler):
    handler.wfile.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    handler.close_connection = True


def bad_gzip(call, handler):
    handler.send(200, b"not gzip at all", content_encoding="gzip")


def silent_close(call, handler):
    handler.close_connection = True


@pytest.mark.parametrize("fault", [half_a_body, no_http, bad_gzip, silent_close])
def test_a_broken_answer_is_unreachable_and_only_get_is_repeated(loopback, client, fault):
    loopback.routes["POST /x"] = loopback.routes["GET /x"] = fault

    with pytest.raises(EngineUnreachable):
        client.post("/x", {})
    assert len(loopback.calls) == 1

    with pytest.raises(EngineUnreachable):
        client.get("/x")
    assert len(loopback.calls) == 1 + ATTEMPTS


def test_a_get_survives_one_broken_answer(loopback, client):
    loopback.routes["GET /x"] = lambda call, handler: (
        half_a_body(call, handler) if len(loopback.calls) == 1 else (200, "fine")
    )

    assert client.get("/x") == "fine"


def test_a_connection_that_was_closed_while_idle_is_replaced(loopback, client):
    """As after a restart: a POST must not be sent into it and lost."""

    def last_words(call, handler):
        handler.send(200, len(loopback.calls))
        handler.close_connection = True  # without a header that announces it

    loopback.routes["POST /x"] = last_words

    assert client.post("/x", {}) == 1
    time.sleep(0.1)
    assert client.post("/x", {}) == 2


@pytest.mark.parametrize(("status", "connections"), [(200, 1), (400, 1), (500, 2)])
def test_the_next_call_after_a_servers_failure_has_a_connection_of_its_own(
    loopback, client, status, connections
):
    """uvicorn closes the first one, some milliseconds later: a POST that is on its way then is lost."""
    ports = []

    def answer(call, handler):
        ports.append(handler.client_address[1])
        return status, {}

    loopback.routes["POST /do"] = answer
    for _ in range(2):
        client.exchange("POST", "/do", {})
    assert len(set(ports)) == connections


def test_a_server_that_hangs_is_given_up(loopback, connect):
    release = threading.Event()
    loopback.routes["POST /x"] = loopback.routes["GET /x"] = lambda call, handler: release.wait(10) and None
    client = connect(loopback.url, timeout_s=0.3)
    begin = time.monotonic()

    with pytest.raises(EngineUnreachable):
        client.post("/x", {})

    assert time.monotonic() - begin < 2
    with pytest.raises(EngineUnreachable):
        client.get("/x")
    assert len(loopback.calls) == 2, "a GET that hangs is not repeated"
    release.set()


def test_a_server_that_is_busy_and_then_hangs_is_given_up_in_time(loopback, connect):
    release = threading.Event()

    def busy_then_stuck(call, handler):
        if len(loopback.calls) > 1:
            return release.wait(10) and None
        time.sleep(1.0)
        return handler.send(429, {"error": "busy"}, retry_after="0")

    loopback.routes["POST /x"] = busy_then_stuck
    # On a busy machine a second call that should come at once came after 0.2 s.
    client = connect(loopback.url, timeout_s=3.0)
    begin = time.monotonic()

    with pytest.raises(EngineUnreachable):
        client.post("/x", {})

    assert time.monotonic() - begin < 3.9, "1 s, and then the 2 s that are left"
    assert len(loopback.calls) == 2
    release.set()


@pytest.mark.parametrize(
    "url",
    [
        *(
            "localhost:8000",
            "ftp://x",
            "http://",
            "http://h:99999",
            "not a url",
            "http://h\x00",
            "http://h:a/",
        ),
        *("http://127.0.0.1:9", f"http://{'a' * 70}.localhost"),
    ],
)
def test_an_address_at_which_nobody_is(connect, url):
    with pytest.raises(EngineUnreachable):
        connect(url).post("/x", {})


def test_a_closed_client_says_so_in_our_words(client):
    client.close()
    client.close()

    with pytest.raises(EngineUnreachable):
        client.post("/x", {})


@pytest.mark.parametrize(
    ("login", "key", "sent"),
    [("", "hunter2", "Bearer hunter2"), ("user:hunter2@", None, "Basic dXNlcjpodW50ZXIy")],
)
def test_secrets_are_sent_and_stay_out_of_messages(loopback, connect, login, key, sent):
    client = connect(loopback.url.replace("http://", f"http://{login}"), api_key=key)

    with pytest.raises(EngineRefused) as caught:
        client.get("/x")

    assert "hunter2" not in str(caught.value)
    assert loopback.calls[0].headers["authorization"] == sent


def test_two_secrets_are_one_too_many():
    with pytest.raises(ConfigError) as caught:
        HttpClient("http://user:hunter2@localhost", api_key="sk-1")

    assert "hunter2" not in str(caught.value)


def test_proxies_of_the_environment_are_ignored(loopback, connect, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    loopback.routes["GET /x"] = answering(200, 1)

    assert connect(loopback.url).get("/x") == 1


def test_each_keeps_order(client):
    assert client.each(lambda item: time.sleep(0.01 * (item % 2)) or item, list(range(16))) == list(range(16))
    assert client.each(lambda item: item, []) == []


def test_after_a_failure_nothing_new_is_sent_and_nothing_stays_in_flight(loopback, client):
    finished = []

    def fail_on_second(call, handler):
        if call.body == 1:
            return 400, {"error": "no"}
        time.sleep(0.2)
        finished.append(call.body)
        return 200, call.body

    loopback.routes["POST /x"] = fail_on_second

    with pytest.raises(EngineRefused):
        client.each(lambda item: client.post("/x", item), list(range(40)))

    sent = len(loopback.calls)
    assert len(finished) == sent - 1
    assert sent < 12
    time.sleep(0.1)
    assert len(loopback.calls) == sent


@pytest.mark.parametrize("status", [500, 503])
def test_whoever_has_the_servers_log_says_what_is_in_it(loopback, connect, status):
    loopback.routes["POST /x"] = answering(status, {"error": "EngineCore encountered an issue"})
    asked = []
    advice = http.RefusalAdvice(log=lambda otherwise: asked.append(otherwise) or "it ran out of luck")
    with pytest.raises(EngineError) as caught:
        connect(loopback.url, timeout_s=5, advice=advice).post("/x", {})
    assert str(caught.value).endswith("; it ran out of luck")
    assert asked == [http.IN_LOG]
    with pytest.raises(EngineError) as caught:
        connect(loopback.url, timeout_s=5).post("/x", {})
    assert str(caught.value).endswith(f"; {http.IN_LOG}")
