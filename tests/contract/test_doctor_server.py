"""The doctor against a small server that speaks as vLLM does, with and without dev mode, and behaves as told."""

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest

from zerodrift.backends.http import HttpClient
from zerodrift.cli.main import main
from zerodrift.core.errors import BadAnswer, EngineRefused, EngineUnreachable
from zerodrift.doctor.behaviour import Drawn, differ, logprobs_mode, penalised
from zerodrift.doctor.diagnosis import Diagnosis, diagnose
from zerodrift.doctor.rule import Severity
from zerodrift.doctor.server import Server
from zerodrift.doctor.setting import Origin, Settings

LOGITS = {"token_id:3": 2.0, "token_id:4": 1.5, "token_id:11": 0.25}
METRICS = b"""# HELP x
vllm:cache_config_info{block_size="16",cache_dtype="fp8",enable_prefix_caching="True",engine="0"} 1.0
"""
CONFIG = {
    "model_config": {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "override_generation_config": {},
        "hf_overrides": {"rope_theta": 5},
        "dtype": "torch.bfloat16",
        "max_model_len": 64,
        "enforce_eager": True,
        "logits_processors": None,
    },
    "cache_config": {"enable_prefix_caching": False, "cache_dtype": "auto"},
    "scheduler_config": {"async_scheduling": False},
    "speculative_config": {"method": "ngram"},
    "device_config": {"device": "cuda"},
}
ENV = {"VLLM_BATCH_INVARIANT": False, "VLLM_SERVER_DEV_MODE": True}


class Vllm:
    """As much of a server as the doctor asks."""

    def __init__(self, loopback: Any) -> None:
        self.loopback = loopback
        self.url: str = loopback.url
        self.mode = "processed_logprobs"
        self.temperature = 1.0
        self.filled: dict[str, float] = {}
        self.key: str | None = None
        loopback.routes |= {
            "GET /v1/models": self.models,
            "GET /version": lambda *_: (200, {"version": "0.99.0"}),
            "GET /metrics": lambda *_: (200, METRICS),
            "GET /openapi.json": lambda *_: (200, {"paths": {"/v1/models": {}}}),
            "POST /v1/completions": self.complete,
        }

    def models(self, call: Any, _handler: Any) -> tuple[int, object]:
        if self.key is not None and call.headers.get("authorization") != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        return 200, {"data": [{"id": "tiny", "max_model_len": 64}]}

    def dev_mode(
        self,
        config: dict[str, Any] | None = None,
        env: dict[str, Any] | None = None,
        system: dict[str, Any] | None = None,
    ) -> None:
        info = {"vllm_config": CONFIG if config is None else config, "vllm_env": ENV if env is None else env}
        info |= {} if system is None else {"system_env": system}
        self.loopback.routes |= {
            "GET /server_info?config_format=json": lambda *_: (200, info),
            "POST /collective_rpc": lambda *_: (200, {}),
        }

    def complete(self, call: Any, _handler: Any) -> tuple[int, object]:
        asked = {"temperature": self.temperature, **self.filled, **call.body}
        outputs: list[str] = []
        steps = []
        for _ in range(call.body["max_tokens"]):
            values = self.step(asked, outputs)
            outputs.append(max(values, key=values.__getitem__))
            steps.append(values)
        return 200, {"choices": [{"index": 0, "logprobs": {"tokens": outputs, "top_logprobs": steps}}]}

    def step(self, asked: dict[str, Any], outputs: list[str]) -> dict[str, float]:
        """The next token's numbers, penalties taken as vLLM takes them."""
        values = dict(LOGITS)
        if "processed" in self.mode:
            if allowed := asked.get("allowed_token_ids"):
                values = {f"token_id:{token}": LOGITS.get(f"token_id:{token}", 1.0) for token in allowed}
            seen = {f"token_id:{token}" for token in asked["prompt"]} | set(outputs)
            for token in values:
                if token in seen:
                    values[token] /= asked.get("repetition_penalty", 1.0)
                values[token] -= asked.get("presence_penalty", 0.0) * (token in outputs)
                values[token] -= asked.get("frequency_penalty", 0.0) * outputs.count(token)
                values[token] /= asked["temperature"]
        if self.mode.endswith("logprobs"):
            total = math.log(sum(math.exp(value) for value in values.values()))
            values = {token: value - total for token, value in values.items()}
        return values

    def read(self, **options: Any) -> Settings:
        return Server(self.url, **options).read().settings


@pytest.fixture
def vllm(loopback):
    return Vllm(loopback)


def diagnosis(vllm: Vllm) -> Diagnosis:
    return diagnose(Server(vllm.url), {})[0]


def doctor(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    return caught.value.code


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_the_mode_is_measured(vllm, mode):
    vllm.mode = mode
    setting = vllm.read()["logprobs_mode"]
    assert (setting.value, setting.origin) == (mode, Origin.MEASURED)


def test_what_is_measured_beats_what_is_shown(vllm):
    vllm.dev_mode()
    assert vllm.read()["logprobs_mode"].origin is Origin.SERVER
    vllm.mode = "raw_logprobs"
    setting = vllm.read()["logprobs_mode"]
    assert (setting.value, setting.origin) == ("raw_logprobs", Origin.MEASURED)


def values(settings: Settings, names: Iterable[str]) -> dict[str, object]:
    return {name: settings[name].value if settings[name].known else "?" for name in names}


HIDDEN = ("generation_config", "dtype", "head_dtype", "async_scheduling", "batch_invariant", "host", "seed")


@pytest.mark.parametrize(
    ("dev_mode", "expected"),
    [
        (
            False,
            {"prefix_caching": True, "kv_cache_dtype": "fp8", "max_model_len": 64, "dev_mode": False}
            | {"api_key": False}
            | dict.fromkeys(HIDDEN, "?"),
        ),
        (
            True,
            {"dtype": "bfloat16", "head_dtype": "model", "hf_overrides": "rope_theta", "device": "cuda"}
            | {"override_generation_config": None, "speculative": "on", "logits_processors": None}
            | {"batch_invariant": False, "dev_mode": True, "seed": "?"},
        ),
    ],
)
def test_what_a_server_shows(vllm, dev_mode, expected):
    if dev_mode:
        vllm.dev_mode()
    assert values(vllm.read(), expected) == expected


def test_a_server_with_neutral_overrides_fills_nothing_in(vllm):
    def overridden(**values):
        vllm.dev_mode({"model_config": {"override_generation_config": values}})
        return vllm.read()["override_generation_config"].value

    assert overridden(temperature=1.0, max_new_tokens=4096) is None
    assert overridden(temperature=1.0, top_p=0.9) == "top_p"


ON_CPU = {"device_config": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("system", "env", "expected", "fires"),
    [
        ({"env_vars": "OMP_NUM_THREADS=2\n"}, {}, None, True),
        ({"env_vars": ""}, {}, None, True),
        ({"env_vars": "MKL_CBWR=AUTO\nOMP_NUM_THREADS=2\n"}, {}, "AUTO", True),
        ({"env_vars": "MKL_CBWR=AVX2\nOMP_NUM_THREADS=2\n"}, {}, "AVX2", False),
        # One thread cannot pick two kernels, unless vLLM binds as many as it likes.
        ({"env_vars": "OMP_NUM_THREADS=1\n"}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, None, False),
        ({"env_vars": "OMP_NUM_THREADS=1\n"}, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}, None, True),
        # What is not listed is unknown, and not unset.
        (None, {}, "?", False),
        ({}, {}, "?", False),
        ({"env_vars": None}, {}, "?", False),
    ],
)
def test_a_server_lists_the_variables_of_libraries(vllm, system, env, expected, fires):
    vllm.dev_mode(ON_CPU, env, system)
    assert values(vllm.read(), ["mkl_cbwr"]) == {"mkl_cbwr": expected}
    assert ("first-call-on-cpu" in {finding.rule for finding in diagnosis(vllm).findings}) is fires


def test_a_server_that_hides_its_device_hides_what_depends_on_it(vllm):
    assert "mkl_cbwr" not in vllm.read()
    vllm.dev_mode(system={"env_vars": ""})
    assert "mkl_cbwr" not in vllm.read()  # on CUDA


def test_an_unreadable_server_info_is_none(vllm):
    vllm.loopback.routes["GET /server_info?config_format=json"] = lambda *_: (200, ["?"])
    assert not vllm.read()["dtype"].known


def test_defaults_that_the_server_fills_in_are_measured(vllm):
    vllm.temperature = 0.6
    found = diagnosis(vllm)
    assert "defaults-measured" in {finding.rule for finding in found.findings}
    assert found.exit_code == 1
    vllm.temperature = 1.0
    assert vllm.read()["generation_defaults"].value is None
    assert vllm.read()["generation_defaults"].origin is Origin.MEASURED


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_that_the_server_fills_in_is_measured(vllm, name):
    vllm.filled = {name: 1.2}
    assert vllm.read()["generation_defaults"].value == "applied"
    vllm.mode = "raw_logprobs"
    assert not vllm.read()["generation_defaults"].known


def test_where_penalties_cannot_be_measured_nothing_is_said_of_defaults(vllm):
    """No restriction to two tokens, or another first token: a penalty would not show."""

    def refuse(call, handler):
        if "allowed_token_ids" in call.body:
            return 400, {"error": "unknown field"}
        return vllm.complete(call, handler)

    vllm.loopback.routes["POST /v1/completions"] = refuse
    vllm.dev_mode({"model_config": {"generation_config": "auto"}})
    assert not vllm.read()["generation_defaults"].known
    assert "generation-config-unseen" in {finding.rule for finding in diagnosis(vllm).findings}


def test_a_repeated_token_is_only_compared_behind_the_same_one():
    step = {"token_id:5": -0.7, "token_id:9": -0.7}
    later = {"token_id:5": -1.5, "token_id:9": -0.3}
    one = Drawn(["token_id:5", "token_id:5"], [step, step])
    assert penalised(one, Drawn(["token_id:5", "token_id:9"], [step, later])) is True
    assert penalised(one, Drawn(["token_id:5", "token_id:9"], [step, step])) is False
    assert penalised(one, Drawn(["token_id:9", "token_id:9"], [step, later])) is None
    assert penalised(one, Drawn(["token_id:5"], [step])) is None


def test_a_server_that_shows_nothing_cannot_be_judged(vllm):
    vllm.loopback.routes["GET /metrics"] = lambda *_: (404, {})
    vllm.loopback.routes["POST /v1/completions"] = lambda *_: (400, {"error": "no logprobs here"})
    found = diagnosis(vllm)
    assert found.exit_code == 3
    assert {row.severity for row in found.settings if row.setting == "logprobs_mode"} == {Severity.UNKNOWN}


HTML = b"<!doctype html><title>Portal</title>"


@pytest.mark.parametrize(
    "answer",
    [(403, {}), (401, b"no"), (500, HTML), (503, {}), (405, {}), (200, HTML), (200, []), (200, {})],
    ids=lambda answer: f"{answer[0]}-{answer[1]!r:.9}",
)
def test_a_proxy_that_lets_v1_through_alone_hides_the_rest(vllm, answer):
    """What is blocked cannot be seen; it neither ends the diagnosis nor says that a door is open, or shut."""

    class Proxy(dict[str, Any]):
        def get(self, route, _default=None):
            return super().get(route) if " /v1/" in route else lambda *_: answer

    vllm.loopback.routes = Proxy(vllm.loopback.routes)
    settings = vllm.read()
    assert settings["logprobs_mode"].value == "processed_logprobs"
    assert settings["max_model_len"].value == 64
    for name in ("dev_mode", "dtype", "prefix_caching"):
        assert not settings[name].known, name
    assert diagnosis(vllm).target.endswith("whose version cannot be seen")


def test_a_door_is_seen_without_the_list_of_routes(vllm):
    del vllm.loopback.routes["GET /openapi.json"]
    assert vllm.read()["dev_mode"].value is False
    vllm.loopback.routes["POST /pause"] = lambda *_: (200, {})
    assert vllm.read()["dev_mode"].value is True


def test_how_to_show_more_is_said_once_and_first(vllm, capsys):
    assert doctor(vllm.url) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("VLLM_SERVER_DEV_MODE=1") == 1
    assert out.index("VLLM_SERVER_DEV_MODE=1") < out.index("type")
    assert doctor(vllm.url, "--json") == 1
    written = json.loads(capsys.readouterr().out)
    assert written["schema"] == "zerodrift.doctor/2"
    assert "VLLM_SERVER_DEV_MODE=1" in written["unseen"]
    vllm.dev_mode()
    assert diagnosis(vllm).unseen == ""


def test_a_command_that_cannot_be_known_is_not_made_up(vllm, capsys):
    """What to change is said on stderr; there is no text to print."""
    assert doctor(vllm.url, "--fix-risks") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "by hand: --no-enable-prefix-caching" in err
    assert "changed:" not in err
    vllm.dev_mode()
    doctor(vllm.url, "--fix-risks")
    assert "by hand: remove --speculative-config" in capsys.readouterr().err


def test_nothing_is_generated_without_leave(vllm):
    assert not vllm.read(probe=False)["logprobs_mode"].known
    assert not vllm.loopback.to("/v1/completions")


def test_nothing_is_changed(vllm):
    vllm.dev_mode()
    assert diagnosis(vllm).target == f"vLLM server at {vllm.url}, which calls itself vLLM 0.99.0"
    assert {call.path for call in vllm.loopback.calls if call.method == "POST"} == {"/v1/completions"}


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (401, {}, "--api-key-env NAME"),
        (403, {}, "--api-key-env NAME"),
        (429, {"retry_after": "3600"}, "asks to wait 3600 s; ask again later"),
        (302, {}, "without saying where to"),
        (302, {"location": "https://login.example/"}, "to https://login.example/"),
    ],
)
def test_a_refusal_names_options_that_the_doctor_has(vllm, capsys, status, headers, words):
    vllm.loopback.routes["GET /v1/models"] = lambda _, handler: handler.send(status, {}, **headers)
    assert doctor(vllm.url) == 3
    err = " ".join(capsys.readouterr().err.split())
    assert words in err
    assert "--set" not in err


def test_a_key_is_sent_and_asked_for(vllm):
    vllm.key = "k"
    with pytest.raises(EngineRefused):
        vllm.read()
    assert vllm.read(api_key="k")["api_key"].value is True
    vllm.key = None
    assert vllm.read(api_key="k")["api_key"].value is False


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://localhost:8000", None),
        ("http://127.0.1.1:8000", None),
        ("http://[::1]:8000", None),
        ("http://[0:0:0:0:0:0:0:1]:8000", None),
        ("https://llm.example.com:8443/proxy", "llm.example.com"),
        ("http://[2001:db8::1]", "2001:db8::1"),
    ],
)
def test_where_a_server_is_seen_from(vllm, monkeypatch, address, host):
    """Over loopback nobody can tell who else reaches it; elsewhere the address is where it listens."""

    class Elsewhere(HttpClient):
        def __init__(self, url, **options):
            super().__init__(vllm.loopback.url, **options)
            self.address = url

    monkeypatch.setattr("zerodrift.doctor.server.HttpClient", Elsewhere)
    vllm.url = address
    setting = vllm.read()["host"]
    assert (setting.known, setting.value) == (host is not None, host)


@pytest.mark.parametrize("answer", [{"data": [{"id": "x"}]}, []])
def test_what_is_no_vllm_is_refused(vllm, answer):
    vllm.loopback.routes["GET /v1/models"] = lambda *_: (200, answer)
    with pytest.raises(BadAnswer):
        vllm.read()


def test_nobody_there():
    with pytest.raises(EngineUnreachable):
        Server("http://127.0.0.1:9", timeout_s=0.5).read()


def test_two_tokens_too_close_tell_nothing():
    assert logprobs_mode({"a": -0.70, "b": -0.69}, {"a": -0.70, "b": -0.69}) is None
    assert logprobs_mode({"a": -0.1}, {"b": -0.1}) is None
    assert differ({"a": -1.0}, {"a": -9999.0})
    assert not differ({"a": -1.0}, {"b": -1.0})
