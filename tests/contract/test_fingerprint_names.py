"""Facts of two engines are compared by name: what means the same must be called the same."""

import pytest

from zerodrift.backends import vllm_facts
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import EngineFingerprint, LogprobKind
from zerodrift.view.panels import compare

# As vLLM 0.32 with processed logprobs, without prefix cache and chunks, told by /server_info.
HEALTHY = {
    "model_config": {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "dtype": "torch.float32",
        "quantization": None,
        "hf_overrides": {},
    },
    "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": False},
    "scheduler_config": {"enable_chunked_prefill": False},
    "parallel_config": {"tensor_parallel_size": 1},
    "device_config": {"device": "cpu"},
    "speculative_config": None,
    "lora_config": None,
}
OWN = {"weights", "transformers", "isa", "machine"}
"""What vLLM does not publish."""


def vllm(**changes: object) -> EngineFingerprint:
    tree = {
        section: dict(values) if isinstance(values, dict) else values for section, values in HEALTHY.items()
    }
    for name, value in changes.items():
        section = next(key for key, values in tree.items() if isinstance(values, dict) and name in values)
        tree[section][name] = value
    return vllm_facts.fingerprint("model", 1024, "/v1/completions", vllm_facts.ServerInfo(tree))


def differing(engine: EngineFingerprint, reference: EngineFingerprint) -> set[str]:
    return {fact.name for part in compare(engine, reference) for fact in part.facts if fact.differs}


@pytest.fixture(scope="module")
def reference():
    return ReferenceBackend("testbed:llama", dtype="float32").fingerprint()


def test_facts_of_the_reference_have_the_names_that_vllm_uses(reference):
    known = {
        "semantic": {*vllm_facts.SEMANTIC, "hf_overrides"},
        "numeric": {*vllm_facts.NUMERIC, *vllm_facts.NUMERIC_SYSTEM, "threads"},
        "deployment": set(vllm_facts.DEPLOYMENT),
    }
    for part, names in known.items():
        assert set(getattr(reference, part)) - OWN <= names, part


def test_a_healthy_engine_differs_in_nothing_that_both_state(reference):
    assert differing(vllm(), reference) <= {"max_model_len"}


@pytest.mark.parametrize(
    ("setting", "value", "fact"),
    [
        ("logprobs_mode", "raw_logprobs", "logprobs_mode"),
        ("generation_config", "auto", "generation_config"),
        ("hf_overrides", {"rope_theta": 1e6}, "hf_overrides"),
        ("dtype", "torch.bfloat16", "dtype"),
        ("quantization", "awq", "quantization"),
        ("cache_dtype", "fp8", "kv_cache_dtype"),
        ("enable_prefix_caching", True, "enable_prefix_caching"),
        ("tensor_parallel_size", 2, "tensor_parallel_size"),
    ],
)
def test_the_setting_behind_a_fault_is_seen(reference, setting, value, fact):
    assert fact in differing(vllm(**{setting: value}), reference)


def test_a_reference_with_raw_logprobs_says_so():
    raw = ReferenceBackend("testbed:llama", dtype="float32", kind=LogprobKind.RAW).fingerprint()
    assert "logprobs_mode" in differing(vllm(), raw)
    assert "logprobs_mode" not in differing(vllm(logprobs_mode="raw_logprobs"), raw)
