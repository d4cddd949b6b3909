import pytest

from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import InvalidValue

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"name": "vllm", "url": URL},
        {"url": URL, "served_model": "policy", "api_key_env": "POLICY_KEY"},
        {"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}},
        {"python": ".engines/bin/python", "args": ("--enforce-eager",)},
        {"max_model_len": 2, "block_size": 1, "max_num_seqs": 1, "tensor_parallel_size": 1},
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
        {"max_num_batched_tokens": 64, "max_model_len": 128},
        {"max_num_batched_tokens": 128, "max_model_len": 128, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
        {"gpu_memory_utilization": 1.0, "startup_timeout_s": 0.1},
    ],
)
def test_what_an_engine_can_obey_is_taken(good: dict[str, object]) -> None:
    engine = EngineConfig(**good)  # type: ignore[arg-type]
    assert all(getattr(engine, name) == value for name, value in good.items())


@pytest.mark.parametrize(
    "bad",
    [
        {"name": ""},
        {"url": "127.0.0.1:8000"},
        {"url": "ftp://engine"},
        {"url": "http://me:secret@engine:8000"},
        {"served_model": ""},
        {"api_key_env": ""},
        {"env": {"HF_TOKEN": "hf_…"}},
        {"args": ("--api-key", "k")},
        {"args": ("--seed=1", "--hf_token=k")},
        {"url": URL, "python": "python"},
        {"url": URL, "args": ("--x",)},
        {"max_model_len": 1},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": -1},
        {"tensor_parallel_size": 0},
        {"concurrency": 0},
        {"startup_timeout_s": 0.0},
        {"request_timeout_s": float("inf")},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": 90},
        {"gpu_memory_utilization": float("nan")},
        {"max_num_batched_tokens": 64, "max_num_seqs": 65},
        {"max_num_batched_tokens": 64, "max_model_len": 65, "enable_chunked_prefill": False},
    ],
    ids=str,
)
def test_what_no_engine_could_obey_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidValue) as caught:
        EngineConfig(**bad)  # type: ignore[arg-type]
    assert any(name in str(caught.value) for name in bad)
    assert "secret" not in str(caught.value).replace("a secret", "")
