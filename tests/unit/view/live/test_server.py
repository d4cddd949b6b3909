"""The server of the live page: what it sends, to whom, and what it refuses."""

import base64
import http.client
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zerodrift.monitor.decision import State
from zerodrift.monitor.monitor import Monitor
from zerodrift.view.live import server as servers
from zerodrift.view.live.server import LiveServer

Serve = Callable[..., LiveServer]
PATIENCE_S = 60.0
TOKEN = "a-token-of-our-own-123"


class Stream:
    """Events of one viewer, as they come."""

    def __init__(self, server: LiveServer, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        self._connection.request("GET", "/events", headers=headers)
        self.answer = self._connection.getresponse()
        self.id = ""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        kind, deadline = "", time.monotonic() + PATIENCE_S
        while line := self.answer.readline():
            # Signs of life come without end.
            assert time.monotonic() < deadline, "what was waited for did not come"
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                self.id = value
            elif name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)

    def until(self, wanted: Callable[[str, Any], bool]) -> list[tuple[str, Any]]:
        found = []
        for kind, content in self:
            found.append((kind, content))
            if wanted(kind, content):
                return found
        raise AssertionError("the stream ended")

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


@pytest.fixture
def stream() -> Iterator[Callable[..., Stream]]:
    opened: list[Stream] = []

    def start(server: LiveServer, **headers: str) -> Stream:
        opened.append(Stream(server, **headers))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def get(
    server: LiveServer, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def rows(events: list[tuple[str, Any]]) -> list[int]:
    blocks = [content for kind, content in events if kind == "rows"]
    raw = [base64.b64decode(block["steps"]) for block in blocks]
    return [int(step) for part in raw for (step,) in struct.iter_unpack("<d", part)]


def has(count: int) -> Callable[[str, Any], bool]:
    return lambda kind, content: kind == "status" and content["rows"] >= count


def test_a_viewer_gets_everything_once_and_then_what_is_new(
    training: Path, serve: Serve, stream: Any
) -> None:
    server = serve(training)
    first = stream(server)
    events = first.until(has(6))
    assert rows(events) == list(range(6))
    status = events[-1][1]
    assert (status["state"], status["step"], status["kept_back"], status["unreadable"]) == ("WARN", 5, 1, 0)
    changes = {each["id"]: each for kind, content in events if kind == "changes" for each in content}
    assert [each["state"] for each in changes.values()] == ["OK", "QUARANTINE", "WARN"]
    monitor = Monitor(directory=training)
    monitor.log_step(6, kl_estimate=1e-4)
    monitor.close()
    more = first.until(has(7))
    assert rows(more) == [6]


def test_who_was_cut_off_goes_on_from_there_and_a_second_viewer_gets_all(
    training: Path, serve: Serve, stream: Any
) -> None:
    server = serve(training)
    first = stream(server)
    first.until(has(6))
    first.close()
    monitor = Monitor(directory=training)
    monitor.log_step(6, kl_estimate=1e-4)
    monitor.close()
    again = stream(server, **{"Last-Event-ID": first.id})
    events = again.until(has(7))
    assert rows(events) == [6]
    assert "reset" not in [kind for kind, _ in events]
    other = stream(server).until(has(7))
    assert rows(other) == list(range(7))
    assert other[0][0] == "reset"


@pytest.mark.parametrize("other", ["0" * 16 + ".0.3.3", "{name}.9.3.3", "{name}.0.999.3"])
def test_an_id_of_another_server_or_epoch_begins_anew(
    training: Path, serve: Serve, stream: Any, other: str
) -> None:
    server = serve(training)
    first = stream(server)
    first.until(has(6))
    name = first.id.partition(".")[0]
    events = stream(server, **{"Last-Event-ID": other.format(name=name)}).until(has(6))
    assert events[0][0] == "reset"
    assert rows(events) == list(range(6))


def test_lines_that_are_none_are_counted_and_harm_nothing(training: Path, serve: Serve, stream: Any) -> None:
    with (training / "steps.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "step\n<script>alert(1)</script>\n{"half":')
    server = serve(training)
    status = stream(server).until(lambda kind, content: kind == "status" and content["unreadable"] == 2)[-1][
        1
    ]
    assert status["rows"] == 6
    assert status["first_bad"].startswith("line 7")


def test_nothing_is_there_yet_and_then_it_is(tmp_path: Path, serve: Serve, stream: Any) -> None:
    server = serve(tmp_path / "later")
    viewer = stream(server)
    (_, _), (kind, status), *_ = viewer.until(lambda kind, _: kind == "batches")
    assert (kind, status["found"], status["rows"], status["state"]) == ("status", False, 0, None)
    monitor = Monitor(directory=tmp_path / "later")
    monitor.log_step(0, kl_estimate=1e-4)
    assert rows(viewer.until(has(1))) == [0]
    monitor.close()


def test_a_batch_down_to_its_tokens(training: Path, serve: Serve, stream: Any) -> None:
    server = serve(training)
    listing = stream(server).until(lambda kind, content: kind == "batches" and content["suspect"] > 0)[-1][1]
    (entry,) = listing["batches"]
    assert (entry["step"], entry["state"], entry["rollouts"]) == (3, "QUARANTINE", 16)
    answer, body = get(server, f"/batches/{entry['batch']}")
    assert answer.status == 200
    batch = json.loads(body)
    sizes = [each["off_by"] for each in batch["rollouts"]]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.1 < sizes[0] < 1
    assert "\u202e" not in body.decode()
    answer, body = get(server, f"/batches/{entry['batch']}/0?from=35")
    tokens = json.loads(body)
    assert tokens["prompt"] == [1, 2, 3]
    assert (tokens["total"], tokens["basis"]) == (40, "old")
    assert [row[0] for row in tokens["tokens"]] == list(range(35, 40))
    _, token, engine, trainer, delta, version, used = tokens["tokens"][0]
    assert 0 <= token < 1000
    assert delta == pytest.approx(trainer - engine)
    assert (version, used) == ("3", True)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/../../etc/passwd", 404),
        ("/%2e%2e/steps.jsonl", 404),
        ("/steps.jsonl", 404),
        ("/batches/" + "0" * 64, 404),
        ("/batches/" + "0" * 63, 404),
        ("/batches/../../monitor.json", 404),
        ("/batches/{batch}/999", 404),
        ("/batches/{batch}/0?from=-1", 400),
        ("/batches/{batch}/0?from=x", 400),
        ("/batches/{batch}/0?from=999999999", 200),
        ("/favicon.ico", 204),
    ],
)
def test_nothing_but_the_page_and_names_in_the_index(
    training: Path, serve: Serve, stream: Any, path: str, status: int
) -> None:
    server = serve(training)
    if "{batch}" in path:
        listing = stream(server).until(lambda kind, content: kind == "batches" and content["suspect"] > 0)[
            -1
        ][1]
        path = path.format(batch=listing["batches"][0]["batch"])
    answer, body = get(server, path)
    assert answer.status == status
    assert b"root:" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_get_and_nothing_else(training: Path, serve: Serve, method: str) -> None:
    answer, _ = get(serve(training), "/", method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LOCALHOST", 200),
        ("localhost:9000", 200),  # ssh -L 9000:localhost:8377
        ("[::1]:{port}", 200),
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:{port}", 421),
        ("localhost:{port}@evil.example", 421),
        ("0.0.0.0:{port}", 421),
        ("127.0.0.1:x", 421),
        ("", 421),
    ],
)
def test_only_by_its_own_name(training: Path, serve: Serve, host: str, status: int) -> None:
    server = serve(training)
    for path in ("/", "/batches/" + "0" * 64):
        answer, _ = get(server, path, host=host.format(port=server.server_port))
        assert answer.status in {status, 404 if status == 200 and path != "/" else status}


def raw(server: LiveServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while data := connection.recv(65536):
            found += data
    return found


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"421"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
    ],
)
def test_requests_that_are_none(training: Path, serve: Serve, request_: bytes, status: bytes) -> None:
    assert raw(serve(training), request_).split(b" ", 2)[1] == status


@pytest.mark.parametrize(
    "request_", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\r\n\r\n", b"\0\r\n\r\n"]
)
def test_what_is_not_http_gets_no_page(training: Path, serve: Serve, request_: bytes) -> None:
    assert b"<html" not in raw(serve(training), request_)


def test_a_last_event_id_that_nobody_sent_is_refused(training: Path, serve: Serve) -> None:
    for bad in ("x", "0" * 16, "1.2.3.4", "0" * 16 + ".0.0." + "9" * 40):
        assert get(serve(training), "/events", **{"Last-Event-ID": bad})[0].status == 400


def test_the_page_runs_what_its_nonce_names_and_loads_nothing(training: Path, serve: Serve) -> None:
    server = serve(training)
    answer, body = get(server, "/")
    text = body.decode()
    policy = answer.headers["content-security-policy"]
    nonce = re.search(r"script-src 'nonce-([\w-]{24})'", policy)
    assert nonce
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert text.count(f'nonce="{nonce[1]}"') == 2
    assert not re.search(r"\b(src|href|srcset|action)=", text)
    assert "{{" not in text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    again = get(server, "/")[0].headers["content-security-policy"]
    assert again != policy, "a nonce is used once"


def test_a_name_that_is_markup_is_text(tmp_path: Path, serve: Serve) -> None:
    directory = tmp_path / "<img onerror=x>"
    directory.mkdir()
    assert b"<img" not in get(serve(directory), "/")[1]


def test_a_token_where_there_is_one(training: Path, serve: Serve) -> None:
    server = serve(training, TOKEN)
    for path in ("/", "/events", "/batches/" + "0" * 64, "/?token=wrong", f"/?token={TOKEN}&token={TOKEN}"):
        assert get(server, path)[0].status == 401
    assert get(server, f"/events?token={TOKEN}")[0].status == 401, (
        "a token in an address is for the page alone"
    )
    answer, _ = get(server, f"/?token={TOKEN}")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert get(server, "/", cookie=cookie.partition(";")[0])[0].status == 200
    assert get(server, "/", cookie=cookie.partition(";")[0][:-1])[0].status == 401
    assert get(server, "/", authorization=f"Bearer {TOKEN}")[0].status == 200
    assert get(server, "/", authorization="Bearer x")[0].status == 401
    assert get(server, "/", cookie="\x01=;;;")[0].status == 401


def test_viewers_are_bounded(
    training: Path, serve: Serve, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "MOST_VIEWERS", 1)
    server = serve(training)
    first = stream(server)
    first.until(has(6))
    assert get(server, "/events")[0].status == 503
    assert get(server, "/")[0].status == 200


def test_an_archive_that_is_damaged_is_said_and_the_rest_goes_on(
    training: Path, serve: Serve, stream: Any
) -> None:
    (training / "archive" / "index.sqlite").write_bytes(b"no database at all, not even a little")
    (training / "archive" / "index.sqlite-wal").unlink(missing_ok=True)
    events = stream(serve(training)).until(lambda kind, content: kind == "batches" and content["problem"])
    assert events[-1][1]["batches"] == []


def test_states_are_those_of_the_monitor(training: Path, serve: Serve) -> None:
    text = get(serve(training), "/")[1].decode()
    assert all(f"{state}:" in text for state in State), (
        "a state without a sentence would be shown as undefined"
    )
