"""From a configuration to llama.cpp's settings and process, with a small script in the place of its interpreter."""

from typing import Any

import pytest

from zerodrift.backends.llama_cpp import LlamaCppBackend
from zerodrift.backends.llama_cpp_launch import SCRIPT, launch_llama_cpp, settings
from zerodrift.backends.registry import ServedModel, open_engine
from zerodrift.config.engine import EngineConfig
from zerodrift.core.completion import LogprobKind
from zerodrift.core.errors import ConfigError, EngineError, EngineUnreachable, ModelNotFound

ENTRY = {"id": 1, "prob": 0.5, "logprob": -0.7, "top_probs": [], "top_logprobs": []}
SAMPLE = {"index": 0, "tokens": [1], "tokens_evaluated": 2, "stop_type": "limit"}
ANSWERS = {
    "/props": {"default_generation_settings": {"n_ctx": 64, "params": {}}, "total_slots": 4},
    "/v1/models": {"data": [{"id": "tiny"}]},
    "/completion": SAMPLE | {"completion_probabilities": [ENTRY]},
}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.touch()
    return path


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(name="llama-cpp", **fields)


def test_by_default_nothing_is_cached_cut_off_or_taken_from_others():
    assert settings(config(), "auto") == [
        "cpuparams.n_threads=1",
        "cpuparams_batch.n_threads=1",
        "n_parallel=4",
        "cache_prompt=false",
        "cache_ram_mib=0",
        "sampling.temp=1",
        "sampling.top_k=0",
        "sampling.top_p=1",
        "sampling.min_p=0",
    ]


def test_a_configuration_is_obeyed_and_own_arguments_come_last():
    told = settings(
        config(
            max_num_seqs=2,
            max_model_len=100,
            max_num_batched_tokens=32,
            enable_prefix_caching=True,
            generation_config="auto",
            args=("cpuparams.n_threads=2",),
        ),
        "auto",
    )
    assert told[2:] == ["n_parallel=2", "n_ctx=200", "n_batch=32", "cpuparams.n_threads=2"]


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"kv_cache_dtype": "fp8"}, "auto"),
        ({"tensor_parallel_size": 2}, "auto"),
        ({"enforce_eager": True}, "auto"),
        ({}, "bfloat16"),
    ],
)
def test_what_llama_cpp_would_not_obey(fields, dtype):
    with pytest.raises(ConfigError):
        settings(config(**fields), dtype)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("processed_logprobs", LogprobKind.PROCESSED), ("raw_logprobs", LogprobKind.RAW)],
)
def test_it_is_started_told_and_stopped(interpreter, model, tmp_path, monkeypatch, mode, kind):
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "7")
    asked = config(
        python=str(interpreter(answers=ANSWERS)),
        startup_timeout_s=20.0,
        logprobs_mode=mode,
        env={"EXTRA": "1"},
    )
    with open_engine(asked, ServedModel(str(model), "auto"), tmp_path / "logs") as engine:
        assert isinstance(engine, LlamaCppBackend)
        assert (engine.name, engine.kind, engine.max_model_len) == ("llama-cpp", kind, 64)
        url = engine._http.address
    log = (tmp_path / "logs" / "llama-cpp.log").read_text()
    port = url.rsplit(":", 1)[1]
    assert f"command -I {SCRIPT} {model} {port} cpuparams.n_threads=1" in log
    assert "env EXTRA 1" in log
    assert "LLAMA_ARG_CTX_SIZE" not in log
    with pytest.raises(EngineUnreachable):
        open_engine(config(url=url, request_timeout_s=1.0), ServedModel("", "auto"), tmp_path).__enter__()


def test_one_that_runs_already_is_asked(loopback, tmp_path):
    loopback.routes["GET /v1/models"] = lambda *_: (200, {"data": []})
    opened = open_engine(config(url=loopback.url), ServedModel("", "auto"), tmp_path)
    with pytest.raises(EngineError, match=r"serves \[\]"):
        opened.__enter__()
    assert [call.path for call in loopback.calls] == ["/v1/models"]


def test_what_cannot_be_started(interpreter, model, tmp_path):
    python = interpreter("sys.exit('failed to load model')")
    with pytest.raises(ModelNotFound):
        launch_llama_cpp(python, tmp_path, [], {}, tmp_path / "log")
    with pytest.raises(EngineError, match="failed to load model"):
        launch_llama_cpp(python, model, [], {}, tmp_path / "log", timeout_s=20.0)
