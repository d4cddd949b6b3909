"""Who gets in: every route × method × token, made of the route table, so that a new route fails until it is classified."""

import base64

import pytest
from serving import ADMIN, INFERENCE, serve

from zerodrift.core.errors import ConfigError
from zerodrift.serve.access import Caller, ServeAccess, check_exposure, new_token_file
from zerodrift.serve.errors import CallRefused
from zerodrift.serve.routes import BY_PATH, ROUTES, Level
from zerodrift.serve.shadow import routes as shadow
from zerodrift.web.access import names_of

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "FOO")
ACCESS = ServeAccess(names_of("127.0.0.1"), ADMIN, INFERENCE)
OPEN_TO_ALL = {"/health", "/liveness"}
"""Written out: a route that is open by mistake must not slip in through the table."""
OF_INFERENCE = {
    *("/version", "/openapi.json", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"),
    *("/inference/v1/generate", "/v1/token_logprobs", "/tokenize", "/server_info", "/weight_info"),
}


OF_PROXY = {
    *("/metrics", "/v1/models", "/version", "/tokenize", "/detokenize"),
    *("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"),
}
TABLES = {"server": BY_PATH, "proxy": shadow.BY_PATH}


def basic(token):
    return "Basic " + base64.b64encode(f"zd:{token}".encode()).decode()


TOKENS = {
    "none": (None, Level.OPEN),
    "wrong": ("Bearer nobody-gave-out-this-one", Level.OPEN),
    "empty": ("Bearer ", Level.OPEN),
    "no scheme": (ADMIN, Level.OPEN),
    "garbled": ("Basic %%%", Level.OPEN),
    "inference": (f"Bearer {INFERENCE}", Level.INFERENCE),
    "inference, basic": (basic(INFERENCE), Level.INFERENCE),
    "admin": (f"Bearer {ADMIN}", Level.ADMIN),
    "admin, basic": (basic(ADMIN), Level.ADMIN),
}


def caller(method, path, authorization=None, **headers):
    given = {"host": ["127.0.0.1:8000"], **{name: [value] for name, value in headers.items()}}
    return Caller(
        method, path, given | ({"authorization": [authorization]} if authorization else {}), "127.0.0.1", 8000
    )


def outcome(who, access=ACCESS):
    try:
        return access.admit(who).level
    except CallRefused as refusal:
        return refusal.status


def test_levels_are_as_written_here():
    levels = {route.path: route.level for route in ROUTES}
    assert {path for path, level in levels.items() if level is Level.OPEN} == OPEN_TO_ALL
    assert {path for path, level in levels.items() if level is Level.INFERENCE} == OF_INFERENCE
    levels = {route.path: route.level for route in shadow.ROUTES}
    assert {path for path, level in levels.items() if level is Level.OPEN} == {"/health", "/ping"}
    assert {path for path, level in levels.items() if level is Level.INFERENCE} == OF_PROXY


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize(
    ("table", "path"),
    [(name, path) for name, table in TABLES.items() for path in [*sorted(table), "/nowhere"]],
)
def test_every_route_method_and_token(table, path, token):
    authorization, level = TOKENS[token]
    routes = TABLES[table]
    access = ACCESS._replace(routes=routes)
    needed = min(route.level for route in routes[path].values()) if path in routes else Level.INFERENCE
    for method in METHODS:
        found = outcome(caller(method, path, authorization), access)
        if level < needed:
            assert found == (401 if authorization is None else 403)
        elif path not in routes:
            assert found == 404
        elif method not in routes[path]:
            assert found == 405
        else:
            assert found is routes[path][method].level


@pytest.mark.parametrize(
    "path",
    [
        *(
            "//pause",
            "/pause/",
            "/v1/../pause",
            "/%70ause",
            "/pause%2f",
            "/pause;a",
            "/PAUSE",
            "/v1/completions/../../pause",
        ),
        *("pause", "", "/pause\x00", "http://127.0.0.1/pause"),
    ],
)
def test_a_path_has_one_spelling(path):
    assert outcome(caller("POST", path)) == 401
    assert outcome(caller("POST", path, f"Bearer {ADMIN}")) == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "a/?x=127.0.0.1"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "localhost:1234"}, Level.OPEN),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9"}, 403),
        ({"origin": "http://127.0.0.1:8000"}, Level.OPEN),
    ],
)
def test_names_and_origins_are_exact(headers, status):
    assert outcome(caller("GET", "/health", **headers)) == status


def test_a_header_twice_is_as_bad_as_none():
    twice = caller("GET", "/health")._replace(headers={"host": ["127.0.0.1", "127.0.0.1"]})
    assert outcome(twice) == 421
    tokens = caller("POST", "/pause", f"Bearer {ADMIN}")
    tokens = tokens._replace(headers={**tokens.headers, "authorization": [f"Bearer {ADMIN}"] * 2})
    assert outcome(tokens) == 403


def test_without_an_inference_token_control_routes_stay_shut():
    access = ACCESS._replace(inference_token=None)
    assert outcome(caller("POST", "/v1/completions"), access) is Level.INFERENCE
    assert outcome(caller("POST", "/pause"), access) == 401
    assert outcome(caller("POST", "/pause", f"Bearer {INFERENCE}"), access) == 403


def test_an_admin_port_takes_control_routes_away_from_the_other():
    access = ACCESS._replace(admin_port=9000)
    who = caller("POST", "/pause", f"Bearer {ADMIN}")
    assert outcome(who, access) == 403
    assert outcome(who._replace(port=9000), access) is Level.ADMIN


def test_beyond_loopback_a_token_is_needed():
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError):
            check_exposure(host, has_token=False, unsafe=False)
        check_exposure(host, has_token=True, unsafe=False)
        check_exposure(host, has_token=False, unsafe=True)
    check_exposure("127.0.0.1", has_token=False, unsafe=False)


def test_the_admin_token_is_its_owners_alone(tmp_path):
    token, path = new_token_file(tmp_path)
    assert path.read_text().strip() == token
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        new_token_file(tmp_path)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    yield from serve(tmp_path_factory.mktemp("root"), inference=INFERENCE)


def test_a_server_asks_too(guarded):
    """The table above decides; that a server asks it, before it reads, is seen here on every route."""
    for path, methods in BY_PATH.items():
        for method, route in methods.items():
            wanted = 200 if route.level is Level.OPEN else 401
            answer = guarded.raw(method, path)
            assert answer.status == wanted, path
            if wanted == 401:
                assert "Basic" in answer.headers["www-authenticate"]
                wrong = guarded.raw(method, path, b"x" * 100, authorization="Bearer nobody-gave-this-one")
                assert wrong.status == 403
        if min(route.level for route in methods.values()) is Level.ADMIN:
            assert guarded.raw("POST", path, b"{}", authorization=f"Bearer {INFERENCE}").status == 403
    assert guarded.post("/v1/completions", {"prompt": [1], "max_tokens": 1}, INFERENCE).status == 200
    assert guarded.raw("GET", "/health", host="evil.example").status == 421
    assert guarded.raw("GET", "/health", origin="http://evil.example").status == 403
    said = guarded.raw("GET", "/nowhere", authorization=f"Bearer {ADMIN}")
    assert (said.status, said.code) == (404, "route/unknown")
    assert "server" not in said.headers


def test_a_token_that_is_another_is_told_so():
    told = {}
    for name in ("none", "wrong"):
        given = TOKENS[name][0]
        headers = {"host": ["127.0.0.1"], **({} if given is None else {"authorization": [given]})}
        with pytest.raises(CallRefused) as refused:
            ACCESS.admit(Caller("POST", "/pause", headers, "127.0.0.1", 8000))
        told[name] = (refused.value.status, refused.value.message)
    assert told["none"][0] == 401
    assert told["wrong"][0] == 403
    assert told["wrong"][1] != told["none"][1]
