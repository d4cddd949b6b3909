"""What clients do to a server that nobody meant: each is bounded, and nobody else notices."""

import http.client
import json
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "unit" / "serve"))

from serving import ADMIN, MODEL, serve
from serving_process import served

from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.serve import bridge, connection, protocol
from zerodrift.serve.limits import ServeLimits

CANARY = {"prompt": [3, 1, 4], "max_tokens": 4, "temperature": 0, "seed": 0, "logprobs": 0}
MOST_BODY = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """With short waits: what takes ten seconds of a slow client takes one here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "HEAD_S", 1.0)
        patch.setattr(connection, "BODY_S", 1.0)
        patch.setattr(connection, "STALLED_S", 1.0)
        yield from serve(
            tmp_path_factory.mktemp("root"),
            limits=ServeLimits(body_bytes=MOST_BODY, bodies_bytes=4 * MOST_BODY),
            max_waiting=64,
        )


@pytest.fixture(autouse=True)
def nobody_else_notices(server):
    """Before and after, the canary has the same bits, and nothing is left in flight."""
    before = server.post("/v1/completions", CANARY).json["choices"]
    yield
    assert server.post("/v1/completions", CANARY).json["choices"] == before
    deadline = time.monotonic() + 10
    while figure(server, "zerodrift_requests_in_flight") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert figure(server, "zerodrift_requests_in_flight") == 0


def figure(server, name):
    page = server.get("/metrics").content.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page if line.startswith(name))


def said(server, *pieces, wait=0.0):
    """What a raw socket hears, until the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        for piece in pieces:
            try:
                raw.sendall(piece)
            except OSError:
                break
            time.sleep(wait)
        heard = b""
        try:
            while piece := raw.recv(65536):
                heard += piece
        except ConnectionResetError:
            pass
        return heard


def head(server, *lines, path="/v1/completions"):
    host = f"Host: 127.0.0.1:{server.port}"
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", host, "Content-Type: application/json", *lines, "", ""]
    ).encode()


def test_a_slow_loris_is_cut_off(server):
    started = time.monotonic()
    assert said(server, b"GET /health HTTP/1.1\r\n").startswith(b"HTTP/1.1 408")
    assert said(server).startswith(b"HTTP/1.1 408")
    assert said(server, head(server, "Content-Length: 100"), b"{").startswith(b"HTTP/1.1 408")
    assert time.monotonic() - started < 9
    several = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for each in several:
        each.sendall(b"GET /hea")
    assert server.get("/health").status == 200
    for each in several:
        each.close()


def test_a_crowd_of_connections_is_bounded_and_no_probe_and_no_trainer_is_turned_away(tmp_path):
    for small in serve(tmp_path, limits=ServeLimits(connections=4)):
        idle = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(5)]
        assert small.get("/health").status == 200
        assert small.admin("/abort_requests", {}).status == 200
        refused = small.post("/v1/completions", CANARY)
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "limit", "1")
        idle += [socket.create_connection(("127.0.0.1", small.port)) for _ in range(3)]
        with pytest.raises(ConnectionError):
            small.get("/health")
        for each in idle:
            each.close()
        deadline = time.monotonic() + 5
        while small.post("/v1/completions", CANARY).status != 200:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(100_000)), b"400"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x00\xff\x01\x00\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"400"),
    ],
)
def test_bad_heads(server, content, status):
    assert said(server, content).split(b" ")[1] == status


def test_large_bodies_are_refused_before_they_are_read(server):
    assert said(server, head(server, "Content-Length: 1000000000")).split(b" ")[1] == b"413"
    assert said(server, head(server, "Content-Length: 9" + "9" * 30)).split(b" ")[1] in (b"400", b"413")
    chunk = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
    endless = said(server, head(server, "Transfer-Encoding: chunked"), *[chunk] * (2 * MOST_BODY // 65536))
    assert endless.split(b" ")[1] == b"413"
    deep = b'{"prompt":' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    assert server.raw("POST", "/v1/completions", deep, content_type="application/json").status == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Content-Length: 2", "Transfer-Encoding: chunked"), b"400"),
        (("Content-Length: 2", "Content-Encoding: gzip"), b"415"),
        (("Content-Length: 2", "Content-Type: application/json; charset=utf-16"), b"415"),
        (("Content-Length: 2", "Content-Type: text/plain"), b"415"),
    ],
)
def test_a_body_that_two_readers_would_read_differently_is_refused(server, headers, status):
    """By a length that is told twice, or an encoding that is not looked at."""
    lines = ["POST /v1/completions HTTP/1.1", f"Host: 127.0.0.1:{server.port}", *headers, "", "{}"]
    assert said(server, "\r\n".join(lines).encode()).split(b" ")[1] == status


@pytest.fixture
def slow_texts(monkeypatch):
    """Texts of 200,000 characters take a tokenizer as long as the test likes."""
    as_prompt, over = bridge.as_prompt, threading.Event()

    def slow(prompt, tokenizer):
        if len(prompt) == len(LONG_TEXT):
            assert over.wait(60)
        return as_prompt(prompt, tokenizer)

    monkeypatch.setattr(bridge, "as_prompt", slow)
    yield over
    over.set()


LONG_TEXT = "a " * 100_000


def test_nobody_waits_for_long_texts(server, slow_texts):
    """Three of 3 MB had everybody wait for half a minute: two threads read texts, and all else waited for them, too."""
    answers = []

    def ask():
        answers.append(server.post("/v1/completions", {"prompt": LONG_TEXT}))

    long = [threading.Thread(target=ask) for _ in range(6)]
    for each in long:
        each.start()
    time.sleep(0.5)
    assert server.post("/v1/completions", CANARY).status == 200
    assert server.post("/tokenize", {"prompt": "3+4="}).status == 200
    assert not answers
    slow_texts.set()
    for each in long:
        each.join()
    assert {answer.status for answer in answers} == {400}


def test_bodies_are_counted_until_they_are_queued(server, slow_texts):
    """Each of 0.8 MB, 4 MB together: what waits for its turn is held, and a fifth is told to come again."""
    body, answers = {"prompt": [LONG_TEXT] * 4}, []
    waiting = [
        threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
        for _ in range(8)
    ]
    for each in waiting:
        each.start()
    deadline = time.monotonic() + 20
    while len(answers) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [answer.status for answer in answers] == [429] * 3
    assert all("retry-after" in answer.headers for answer in answers)
    slow_texts.set()
    for each in waiting:
        each.join()
    assert sorted(answer.status for answer in answers) == [400] * 5 + [429] * 3
    assert server.post("/v1/completions", {**body, "prompt": LONG_TEXT}).status == 400


STREAM = {
    "prompt": [7, 7],
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
    "seed": 1,
}


def test_a_client_that_leaves_frees_its_request(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(STREAM), {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read(100)
    before = figure(server, "zerodrift_client_disconnects_total")
    # The answer holds the socket as well: closing the connection alone would leave it open.
    answer.close()
    connection.close()
    deadline = time.monotonic() + 5
    while figure(server, "zerodrift_requests_in_flight") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert figure(server, "zerodrift_requests_in_flight") == 0
    assert figure(server, "zerodrift_client_disconnects_total") == before + 1


def test_a_client_that_never_reads_is_cut_off(server):
    """11 MB: buffers hold less."""
    ask = {**STREAM, "n": 32, "max_tokens": 100, "logprobs": 100}
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        body = json.dumps(ask).encode()
        raw.sendall(head(server, f"Content-Length: {len(body)}") + body)
        before = figure(server, "zerodrift_client_disconnects_total")
        deadline = time.monotonic() + 60
        while figure(server, "zerodrift_client_disconnects_total") == before and time.monotonic() < deadline:
            time.sleep(0.1)
    assert figure(server, "zerodrift_client_disconnects_total") == before + 1


def test_a_half_closed_client_is_gone(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        body = json.dumps({**STREAM, "stream": False}).encode()
        raw.sendall(head(server, f"Content-Length: {len(body)}") + body)
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(10) == b""


def test_beyond_the_queue_is_429(server):
    server.post("/pause?mode=keep", None, ADMIN)
    ask = {"prompt": [[1]] * 60, "max_tokens": 1, "seed": 1}
    waiting = [threading.Thread(target=server.post, args=("/v1/completions", ask)) for _ in range(1)]
    for each in waiting:
        each.start()
    while figure(server, "zerodrift_engine_waiting ") < 60:
        time.sleep(0.01)
    refused = server.post("/v1/completions", {**ask, "prompt": [[1]] * 10})
    assert (refused.status, refused.code) == (429, "engine/queue-full")
    assert int(refused.headers["retry-after"]) >= 1
    assert server.get("/health").status == 200
    server.post("/resume", None, ADMIN)
    for each in waiting:
        each.join()


class Streaming(threading.Thread):
    """One stream, begun at its time whatever became of the others."""

    def __init__(self, server, seed, tokens):
        super().__init__()
        self.server, self.seed, self.tokens, self.answer = server, seed, tokens, None

    def run(self):
        ask = {
            **STREAM,
            "seed": self.seed,
            "max_tokens": self.tokens,
            "logprobs": 0,
            "prompt": [self.seed, 5],
        }
        self.answer = self.server.post("/v1/completions", ask)

    @property
    def joined(self):
        choices = [event["choices"][0] for event in self.answer.events]
        ids = [token for choice in choices for token in choice["token_ids"]]
        return ids, [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]


def test_sixty_four_streams_lose_nothing(server):
    streams = [Streaming(server, seed, 8) for seed in range(1, 65)]
    for each in streams:
        each.start()
    for each in streams:
        each.join()
    outputs = Engine(MODEL).generate(
        [[each.seed, 5] for each in streams],
        [SamplingParams(seed=each.seed, max_tokens=8, ignore_eos=True) for each in streams],
    )
    for each, output in zip(streams, outputs, strict=True):
        assert each.joined == (list(output.token_ids), list(output.logprobs))


def test_a_route_without_a_body_holds_none(server):
    """Whoever may call /health may not take the memory of those who generate."""
    for route in ("/health", "/v1/models"):
        lines = (f"GET {route} HTTP/1.1", "host: 127.0.0.1", f"content-length: {MOST_BODY - 1}", "", "")
        assert said(server, "\r\n".join(lines).encode() + bytes(1000)).startswith(b"HTTP/1.1 413")
        chunked = (
            f"GET {route} HTTP/1.1",
            "host: 127.0.0.1",
            "transfer-encoding: chunked",
            "",
            "1000",
            "x" * 4096,
            "",
        )
        assert said(server, "\r\n".join(chunked).encode()).startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_while_its_prompts_are_queued_frees_all_of_them(server, monkeypatch):
    """64 prompts, each queued slowly; the client goes after the first few."""
    submit = EngineLoop.submit

    def slow(*arguments, **options):
        time.sleep(0.02)
        return submit(*arguments, **options)

    monkeypatch.setattr(EngineLoop, "submit", slow)
    body = json.dumps({"prompt": [[5, n] for n in range(60)], "max_tokens": 400, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(head(server, f"Content-Length: {len(body)}") + body)
        while not figure(server, "zerodrift_requests_in_flight"):
            time.sleep(0.01)
    deadline = time.monotonic() + 20
    time.sleep(1.5)  # all have been queued by now
    while figure(server, "zerodrift_requests_in_flight") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert figure(server, "zerodrift_requests_in_flight") == 0


def test_names_of_any_length_are_refused_at_once(server):
    begin = time.process_time()
    answer = server.post("/v1/completions", {"prompt": [1], "x" * (MOST_BODY - 100): 1})
    assert answer.code == "body/unknown-field"
    assert time.process_time() - begin < 1.0
    query = "&".join(f"a{n}=1" for n in range(40))
    assert server.get(f"/health?{query}").status == 400


def test_more_numbers_than_one_answer_holds_are_refused_before_they_are_computed(server):
    asked = {"prompt": [[5, n] for n in range(60)], "max_tokens": 900, "n": 8, "logprobs": 100}
    answer = server.post("/v1/completions", asked)
    assert (answer.status, answer.code) == (400, "limit")


def test_refused_paths_leave_no_file_open(server):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    server.admin("/update_weights", {"weight_dir": "../x"})
    before = count()
    for _ in range(20):
        assert server.admin("/update_weights", {"weight_dir": "../x"}).status == 422
    assert count() <= before + 3


def test_an_empty_list_of_requests_ends_none(server):
    assert server.admin("/abort_requests", {"request_ids": []}).json["aborted"] == 0


def test_a_stream_that_runs_out_of_time_says_so(tmp_path):
    for short in serve(tmp_path, limits=ServeLimits(request_s=0.5)):
        *_, last = short.post("/v1/completions", {**STREAM, "max_tokens": 900}).events
        assert last["error"]["code"] == "request-timeout"


def test_a_server_of_a_shell_has_room_for_all_its_connections(tmp_path):
    """1,024 open files are what a shell allows; 1,024 connections took all of them, and an update could open none."""
    with served(tmp_path, model=MODEL, open_files=1024) as process:
        limits = Path(f"/proc/{process.process.pid}/limits").read_text()
    [soft] = [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(soft) >= 2 * ServeLimits().connections
