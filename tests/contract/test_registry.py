"""From a configuration to an engine that answers, and to nothing left behind when it is done with."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.registry import IMPOSSIBLE, OPENERS, STARTED_BY_HAND, ServedModel, open_engine
from zerodrift.backends.vllm import VllmBackend
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import (
    CapabilityMissing,
    ConfigError,
    EngineError,
    EngineUnreachable,
)

SERVED = ServedModel("testbed:llama", "auto")

ANSWERS = {
    "/v1/models": {"data": [{"id": "tiny", "max_model_len": 64}]},
    "/v1/completions": {"choices": [{"index": 0, "token_ids": [1]}]},
}


@pytest.mark.parametrize(
    ("name", "hint"), [("vlm", "did you mean 'vllm'"), ("unheard-of", ""), ("tgi", ""), ("tensorrt-llm", "")]
)
def test_an_engine_that_nobody_knows(name, hint, tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_engine(EngineConfig(name=name, url="http://127.0.0.1:9"), SERVED, tmp_path)
    assert ", ".join(OPENERS) in str(caught.value)
    assert hint in str(caught.value)
    assert name not in OPENERS


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        *((name, {"python": "python"}, ConfigError) for name in STARTED_BY_HAND),
        *((name, {"url": "http://127.0.0.1:9"}, CapabilityMissing) for name in IMPOSSIBLE),
        ("vllm", {}, ConfigError),
        ("llama-cpp", {}, ConfigError),
        ("vllm", {"url": "http://127.0.0.1:9", "request_timeout_s": 1.0}, EngineUnreachable),
        *((name, {"route": "generate"}, ConfigError) for name in ("reference", "exact")),
        *(
            (name, {"route": "generate", "url": "http://127.0.0.1:9"}, ConfigError)
            for name in ("llama-cpp", "sglang")
        ),
    ],
)
def test_an_engine_that_cannot_be_reached_so(name, options, error, tmp_path):
    with pytest.raises(error), open_engine(EngineConfig(name=name, **options), SERVED, tmp_path):
        pass


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("raw_logprobs", LogprobKind.RAW), ("processed_logprobs", LogprobKind.PROCESSED)],
)
@pytest.mark.parametrize(("dtype", "computed"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_the_reference_as_an_engine(tmp_path, mode, kind, dtype, computed):
    """Not in the reference's own fp64: an engine rounds."""
    config = EngineConfig(name="reference", logprobs_mode=mode)
    with open_engine(config, ServedModel("testbed:llama", dtype), tmp_path) as engine:
        assert isinstance(engine, ReferenceBackend)
        assert engine.kind is kind
        assert engine.fingerprint().numeric["dtype"] == computed
    assert not list(tmp_path.iterdir())


def test_an_engine_that_runs_already(loopback, tmp_path):
    for route in ("GET /v1/models", "POST /v1/completions"):
        loopback.routes[route] = lambda call, _: (200, ANSWERS[call.path])
    config = EngineConfig(name="vllm", url=loopback.url, request_timeout_s=3.0, concurrency=2)
    with open_engine(config, SERVED, tmp_path) as engine:
        assert isinstance(engine, VllmBackend)
        assert engine.model == "tiny"
        assert (engine._http.timeout_s, engine._http.concurrency) == (3.0, 2)
    with pytest.raises(EngineUnreachable):
        engine._http.get("/v1/models")
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_started_obeys_and_is_stopped(interpreter, tmp_path):
    config = EngineConfig(
        name="vllm",
        python=str(interpreter(answers=ANSWERS)),
        max_num_seqs=3,
        startup_timeout_s=20.0,
        args=("--seed", "9"),
    )
    with open_engine(config, ServedModel("some-model", "float32"), tmp_path / "logs") as engine:
        assert engine.max_model_len == 64
        url = engine._http.address
    log = (tmp_path / "logs" / "vllm.log").read_text()
    for part in ("--model some-model", "--dtype float32", "--max-num-seqs 3", "--seed 9"):
        assert part in log
    with pytest.raises(EngineUnreachable):
        VllmBackend(url, timeout_s=1.0)


def test_it_is_stopped_after_a_failure_too(interpreter, tmp_path):
    config = EngineConfig(name="vllm", python=str(interpreter(answers=ANSWERS)), startup_timeout_s=20.0)
    urls = []

    def fail():
        with open_engine(config, SERVED, tmp_path / "logs") as engine:
            urls.append(engine._http.address)
            raise EngineError("halfway")

    with pytest.raises(EngineError, match="halfway"):
        fail()
    with pytest.raises(EngineUnreachable):
        VllmBackend(urls[0], timeout_s=1.0)


def test_a_server_of_ours_that_fails_says_what_is_in_its_log(interpreter, tmp_path):
    fails = 'print("RuntimeError: out of luck", flush=True)'
    python = str(interpreter(body=fails, answers=ANSWERS))
    config = EngineConfig(name="vllm", python=python, startup_timeout_s=20.0)
    with open_engine(config, SERVED, tmp_path / "logs") as engine:
        assert isinstance(engine, VllmBackend)
        # Nobody listens there: as where the process has ended.
        with pytest.raises(EngineUnreachable) as raised, _gone(engine):
            engine._http.post("/v1/completions", {})
    assert "RuntimeError: out of luck" in str(raised.value)
    assert str(tmp_path / "logs" / "vllm.log") in str(raised.value)


@contextmanager
def _gone(engine: VllmBackend) -> Iterator[None]:
    engine._http._client.base_url = "http://127.0.0.1:9"
    yield
