"""The proxy before an engine that does what a test says: what passes, who may call, and every way not to get an answer."""

import json
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from loopback import event, serving
from serving import ADMIN, INFERENCE
from shadowing import shadowing

from zerodrift.core.errors import ConfigError
from zerodrift.serve.limits import ServeLimits
from zerodrift.serve.shadow.routes import ROUTES
from zerodrift.serve.shadow.upstream import origin_of

COMPLETIONS = "/v1/completions"
JSON = {"content_type": "application/json"}
ASK = {"prompt": [1, 2], "max_tokens": 2}


@pytest.fixture(scope="module")
def engine():
    with serving() as loopback:
        yield loopback


@pytest.fixture(scope="module")
def proxy(engine):
    with shadowing(engine.url) as served:
        yield served


@pytest.fixture(autouse=True)
def says(engine):
    """What the engine has, anew for each test."""
    engine.calls.clear()
    engine.routes.clear()
    engine.routes |= {
        f"POST {COMPLETIONS}": lambda _, http: http.send(200, {"choices": []}, **JSON, x_request_id="7"),
        **{
            f"POST {path}": lambda *_: (200, {"message": "done"})
            for path in (
                "/resume",
                "/start_weight_update",
                "/update_weights",
                "/finish_weight_update",
                "/update_weight_version",
                "/collective_rpc",
            )
        },
        "POST /pause?mode=keep": lambda *_: (200, {"status": "paused"}),
        "GET /metrics": lambda *_: (200, b"vllm:requests 1"),
        "GET /v1/models": lambda *_: (200, {"data": []}),
    }
    return engine.routes


def salts(engine):
    return [call.body["cache_salt"] for call in engine.to(COMPLETIONS)]


def metric(proxy, name):
    lines = proxy.get("/metrics").content.decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"zerodrift_shadow_{name}")
    )


def test_a_request_passes_as_it_is_but_for_its_salt(engine, proxy):
    answer = proxy.raw(
        "POST", COMPLETIONS, json.dumps(ASK).encode(), content_type="application/json", x_trace="t"
    )
    assert (answer.status, answer.json) == (200, {"choices": []})
    assert (answer.headers["x-request-id"], answer.headers["x-zerodrift-weight-version"]) == (
        "7",
        answer.headers["x-zerodrift-weight-version"],
    )
    [call] = engine.to(COMPLETIONS)
    assert {name: value for name, value in call.body.items() if name != "cache_salt"} == ASK
    assert call.headers["x-trace"] == "t"
    assert f"http://{call.headers['host']}" == engine.url


def test_its_errors_are_its_own(proxy, says):
    says[f"POST {COMPLETIONS}"] = lambda *_: (422, {"error": {"message": "no"}})
    answer = proxy.post(COMPLETIONS, ASK)
    assert (answer.status, answer.json) == (422, {"error": {"message": "no"}})


UPDATES = [
    [
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"a": 1}}),
        ("/finish_weight_update", {}),
    ],
    [("/update_weights", {"weight_dir": "/somewhere"})],
    [("/collective_rpc", {"method": "reload_weights"})],
    [("/update_weight_version", {"new_version": "step 7"})],
]


@pytest.mark.parametrize("calls", UPDATES)
def test_an_update_changes_the_salt_once_whatever_protocol_it_speaks(engine, proxy, calls):
    before = [proxy.post(COMPLETIONS, ASK).headers["x-zerodrift-weight-version"] for _ in range(2)]
    for path, body in calls:
        assert proxy.admin(path, body).status == 200
    after = [proxy.post(COMPLETIONS, ASK).headers["x-zerodrift-weight-version"] for _ in range(2)]
    first, second, third, fourth = salts(engine)
    assert first == second != third == fourth
    assert [int(each) for each in after] == [int(each) + 1 for each in before]


def test_between_start_and_finish_nobody_shares_a_cache(engine, proxy):
    proxy.admin("/start_weight_update")
    for _ in range(2):
        assert proxy.post(COMPLETIONS, ASK).headers["x-zerodrift-weight-version"].endswith("mixed")
    proxy.admin("/finish_weight_update", {})
    first, second = salts(engine)
    assert first != second


@pytest.mark.parametrize("status", [400, 500])
def test_an_update_that_fails_is_a_new_version_since_nobody_knows_what_it_did(engine, proxy, says, status):
    proxy.post(COMPLETIONS, ASK)
    proxy.admin("/start_weight_update")
    says["POST /update_weights"] = lambda *_: (status, {"error": "no"})
    assert proxy.admin("/update_weights", {"update_info": {}}).status == status
    says["POST /finish_weight_update"] = lambda *_: (500, {"error": "nothing to finish"})
    proxy.admin("/finish_weight_update", {})
    versions = [proxy.post(COMPLETIONS, ASK).headers["x-zerodrift-weight-version"] for _ in range(2)]
    assert versions[0] == versions[1]
    first, second, third = salts(engine)
    assert first != second == third


def test_a_stream_is_passed_piece_by_piece(proxy, says):
    go_on = threading.Event()

    def slowly(_, http):
        http.send_response(200)
        http.send_header("content-type", "text/event-stream; charset=utf-8")
        http.send_header("transfer-encoding", "chunked")
        http.end_headers()
        for piece in (event({"n": 1}), event({"n": 2}), event("[DONE]")):
            http.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            http.wfile.flush()
            assert go_on.wait(10)
        http.wfile.write(b"0\r\n\r\n")

    says[f"POST {COMPLETIONS}"] = slowly
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(request(COMPLETIONS, ASK | {"stream": True}))
        came = b""
        while b'"n": 1' not in came:
            came += raw.recv(4096)
        assert b'"n": 2' not in came
        go_on.set()
        while b"[DONE]" not in came:
            came += raw.recv(4096)
    assert b"x-zerodrift-weight-version" in came


def request(path, body):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def cut(_, http):
    """The connection ends in the middle of an answer."""
    http.send_response(200)
    http.send_header("content-type", "application/json")
    http.send_header("content-length", "1000")
    http.end_headers()
    http.wfile.write(b'{"choices"')
    http.close_connection = True


def cut_stream(_, http):
    http.send_response(200)
    http.send_header("content-type", "text/event-stream")
    http.send_header("transfer-encoding", "chunked")
    http.end_headers()
    http.wfile.write(b"%x\r\n%s\r\n" % (9, b"data: {}\n"))
    http.close_connection = True


def no_http(_, http):
    http.wfile.write(b"220 mail.example.org ESMTP\r\n")
    http.close_connection = True


def silent(_, http):
    http.close_connection = True


def elsewhere(_, http):
    http.send(307, b"", location="http://192.0.2.1/")


def a_page(_, http):
    http.send(200, b"<html>", content_type="text/html")


@pytest.mark.parametrize(
    ("does", "code"),
    [
        (cut, "upstream/broken"),
        (no_http, "upstream/broken"),
        (silent, "upstream/broken"),
        (elsewhere, "upstream/redirect"),
        (a_page, "upstream/nonsense"),
    ],
)
def test_a_bad_engine_is_an_error_of_that_request_alone(proxy, says, does, code):
    good = says[f"POST {COMPLETIONS}"]
    says[f"POST {COMPLETIONS}"] = does
    answer = proxy.post(COMPLETIONS, ASK)
    assert (answer.status, answer.code) == (502, code)
    says[f"POST {COMPLETIONS}"] = good
    assert proxy.post(COMPLETIONS, ASK).status == 200


def test_what_comes_behind_an_answer_is_not_the_next_answer(proxy, says):
    two = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    planted = two.replace(b"{}", b"[]")
    says[f"POST {COMPLETIONS}"] = lambda _, http: http.wfile.write(two + planted) and None
    answers = [proxy.post(COMPLETIONS, ASK).content for _ in range(3)]
    assert answers == [b"{}"] * 3


def test_a_large_answer_comes_whole(proxy, says):
    body = json.dumps({"choices": ["x" * 5_000_000]}).encode()
    says[f"POST {COMPLETIONS}"] = lambda _, http: http.send(200, body, **JSON)
    assert proxy.post(COMPLETIONS, ASK | {"pad": "y" * 3_000_000}).content == body


def test_a_stream_that_is_cut_says_so(proxy, says):
    says[f"POST {COMPLETIONS}"] = cut_stream
    answer = proxy.post(COMPLETIONS, ASK | {"stream": True})
    assert answer.status == 200
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert b'"code":"upstream/broken"' in answer.content


def test_a_control_call_that_was_cut_is_not_for_a_client_to_send_again(engine, proxy, says):
    """TRL and prime-rl re-send on every 5xx, and a second update may hit what the first left."""
    says["POST /update_weights"] = silent
    before = proxy.post(COMPLETIONS, ASK)
    answer = proxy.admin("/update_weights", {"weight_dir": "/a"})
    assert (answer.status, answer.code) == (424, "upstream/broken")
    after = proxy.post(COMPLETIONS, ASK)
    assert before.headers["x-zerodrift-weight-version"] != after.headers["x-zerodrift-weight-version"]


def test_an_engine_that_is_not_there_and_one_that_was():
    with serving() as engine, shadowing(engine.url) as proxy:
        engine.routes[f"POST {COMPLETIONS}"] = lambda _, http: http.send(200, {}, **JSON)
        assert proxy.post(COMPLETIONS, ASK).headers["x-zerodrift-weight-version"] == "0"
        # Nobody listens there any more, and what comes next may have been started anew.
        port = int(engine.url.rpartition(":")[2])
    with shadowing(f"http://127.0.0.1:{port}") as proxy:
        for _ in range(2):
            answer = proxy.post(COMPLETIONS, ASK)
            assert (answer.status, answer.code) == (502, "upstream/unreachable")
        assert proxy.admin("/pause?mode=keep").status == 502  # nothing was sent: it may be asked again
        assert proxy.get("/health").status == 502
        assert metric(proxy, "upstream_up") == 0
        assert metric(proxy, "weight_version") == 0


def test_an_engine_that_takes_too_long(engine, says):
    go_on = threading.Event()
    says[f"POST {COMPLETIONS}"] = lambda *_: go_on.wait(10) and (200, {})
    says["POST /resume"] = says[f"POST {COMPLETIONS}"]
    with shadowing(engine.url, limits=ServeLimits(request_s=0.3)) as proxy:
        answer = proxy.post(COMPLETIONS, ASK)
        assert (answer.status, answer.code) == (504, "upstream/timeout")
        answer = proxy.admin("/resume")
        assert (answer.status, answer.code) == (424, "upstream/timeout")
        go_on.set()


def test_a_client_that_leaves_is_left_by_the_engine_too(proxy, says):
    gone = threading.Event()

    def waits(_, http):
        http.connection.settimeout(10)
        if http.connection.recv(1) == b"":
            gone.set()
        http.close_connection = True

    says[f"POST {COMPLETIONS}"] = waits
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(request(COMPLETIONS, ASK))
        while metric(proxy, "requests_alive") == 0:
            time.sleep(0.01)
    assert gone.wait(10)


def test_only_what_the_table_has_is_passed(engine, proxy):
    for path in ("/docs", "/v1/embeddings", "/v1/../pause", "//pause", "/%70ause", "/v1/completions/"):
        assert proxy.admin(path).status == 404, path
    assert proxy.raw("DELETE", COMPLETIONS).status == 405
    assert engine.calls == []


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.level == 2], ids=lambda r: f"{r.method} {r.path}"
)
def test_control_routes_need_our_admin_token(engine, proxy, route):
    assert proxy.raw(route.method, route.path).status == 401
    assert proxy.raw(route.method, route.path, authorization="Bearer another").status == 403
    assert engine.calls == []


def test_a_get_of_a_control_route_tells_whether_the_engine_has_it(proxy):
    assert proxy.get("/update_weights", ADMIN).status == 405
    assert proxy.get("/weight_checker", ADMIN).status == 404


def test_tokens_of_ours_stay_here_and_the_key_of_the_engine_is_sent(engine, says):
    with shadowing(engine.url, inference=INFERENCE) as proxy:
        assert proxy.get("/v1/models").status == 401
        assert proxy.get("/v1/models", INFERENCE).status == 200
        assert "authorization" not in engine.calls[-1].headers
    with shadowing(engine.url) as proxy:
        assert proxy.get("/v1/models", "of-the-client").status == 200
        assert engine.calls[-1].headers["authorization"] == "Bearer of-the-client"
        proxy.get("/v1/models", ADMIN)
        assert "authorization" not in engine.calls[-1].headers
    with shadowing(engine.url, key="of-the-engine") as proxy:
        proxy.get("/v1/models", "of-the-client")
        assert engine.calls[-1].headers["authorization"] == "Bearer of-the-engine"


def test_sizes_are_counted(proxy):
    assert proxy.raw("POST", COMPLETIONS, None, content_length=str(9 * 2**20)).status == 413
    assert proxy.post(f"{COMPLETIONS}?{'a' * 3000}", ASK).status == 414
    answer = proxy.raw("POST", COMPLETIONS, b"{}", content_type="application/json", content_encoding="gzip")
    assert answer.status == 415


@pytest.mark.parametrize(
    ("path", "body", "changes"),
    [
        ("/weight_checker", {"action": "checksum"}, False),
        ("/weight_checker", {"action": "reset"}, True),
        ("/sleep?level=1", {}, False),
        ("/sleep", {}, False),
        ("/sleep?level=2", {}, True),
    ],
)
def test_a_call_that_takes_weights_away_is_a_version(proxy, says, path, body, changes):
    says[f"POST {path}"] = lambda *_: (200, {})

    def version():
        return proxy.post(COMPLETIONS, ASK).headers["x-zerodrift-weight-version"]

    before = version()
    assert proxy.admin(path, body).status == 200
    assert (version() != before) is changes


def test_metrics_are_the_engines_and_ours_behind_them(proxy, says):
    lines = proxy.get("/metrics").content.decode().splitlines()
    assert lines[0] == "vllm:requests 1"
    assert "zerodrift_shadow_upstream_up 1" in lines
    says["GET /metrics"] = silent
    assert proxy.get("/metrics").content.startswith(b"# HELP zerodrift_shadow")


@pytest.mark.parametrize(
    "url", ["ftp://a", "a:8000", "http://", "http://a/v1", "http://a?b", "http://u:p@a", "http://a:b"]
)
def test_an_address_is_one_origin(url):
    with pytest.raises(ConfigError):
        origin_of(url)


def test_an_update_waits_for_what_is_in_flight_and_new_requests_wait_for_the_update(engine, says):
    order, answers = [], []
    asked, go_on = threading.Event(), threading.Event()

    def slowly(call, http):
        asked.set()
        assert go_on.wait(10)
        order.append("generated")
        http.send(200, {}, **JSON)

    def update(*_):
        order.append("updated")
        return 200, {}

    says[f"POST {COMPLETIONS}"], says["POST /update_weights"] = slowly, update
    with shadowing(engine.url, drains=True) as proxy:

        def generate():
            answers.append(proxy.post(COMPLETIONS, ASK).headers["x-zerodrift-weight-version"])

        def change():
            answers.append(proxy.admin("/update_weights", {"weight_dir": "/a"}).status)

        threads = [threading.Thread(target=generate)]
        threads[0].start()
        assert asked.wait(10)
        threads.append(threading.Thread(target=change))
        threads[1].start()
        time.sleep(0.3)
        threads.append(threading.Thread(target=generate))
        threads[2].start()
        time.sleep(0.3)
        assert order == []
        go_on.set()
        for thread in threads:
            thread.join(10)
    assert order == ["generated", "updated", "generated"]
    assert sorted(map(str, answers)) == ["0", "1", "200"]


def test_an_update_that_cannot_be_drained_is_refused_and_not_sent(engine, says):
    go_on, asked = threading.Event(), threading.Event()
    says[f"POST {COMPLETIONS}"] = lambda *_: asked.set() or (go_on.wait(10) and (200, {}))
    with shadowing(engine.url, drains=True, limits=ServeLimits(drain_s=0.2)) as proxy:
        thread = threading.Thread(target=proxy.post, args=(COMPLETIONS, ASK))
        thread.start()
        assert asked.wait(10)
        answer = proxy.admin("/update_weights", {"weight_dir": "/a"})
        assert (answer.status, answer.code) == (409, "update/not-drained")
        assert engine.to("/update_weights") == []
        go_on.set()
        thread.join(10)
