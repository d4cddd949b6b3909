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
    ("bad", "says"),
    [
        ({"name": ""}, "name is empty"),
        ({"url": "127.0.0.1:8000"}, "write http://127.0.0.1:8000"),
        ({"url": "ftp://engine"}, "'ftp://engine', which is not HTTP; write http://engine or"),
        ({"url": "http://me:secret@engine:8000"}, "url holds a user or password; .* api_key_env"),
        ({"served_model": ""}, "served_model is an empty string"),
        ({"api_key_env": ""}, "api_key_env is an empty string"),
        ({"env": {"HF_TOKEN": "hf_…"}}, "env holds HF_TOKEN, which looks like a secret"),
        ({"args": ("--api-key", "k")}, "args hold --api-key, whose value is a secret"),
        ({"args": ("--seed=1", "--hf_token=k")}, "args hold --hf-token, whose value is a secret"),
        ({"url": URL, "python": "python"}, "keep one of the two"),
        ({"url": URL, "args": ("--x",)}, "keep one of the two"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"startup_timeout_s": 0.0}, "startup_timeout_s is 0.0"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s is inf"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization is 90"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 65}, "below max_num_seqs=65"),
        (
            {"max_num_batched_tokens": 64, "max_model_len": 65, "enable_chunked_prefill": False},
            "fits in no step",
        ),
    ],
)
def test_what_no_engine_could_obey_is_refused(bad: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        EngineConfig(**bad)  # type: ignore[arg-type]
