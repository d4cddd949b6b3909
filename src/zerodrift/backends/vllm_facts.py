"""Which of the settings in force say what vLLM's numbers mean, which how they are computed, and which only where?

Read from /server_info, which shows the effective configuration, not the command line. A setting that a release
does not have is left out: two releases then differ in it, as they should.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from zerodrift.backends.json_path import as_fact, facts_at, look_up
from zerodrift.core.completion import EngineFingerprint, LogprobKind

ENGINE = "vllm"


def _in(section: str, *names: str) -> dict[str, str]:
    return {name: f"{section}/{name}" for name in names}


SEMANTIC = {
    **_in("model_config", "logprobs_mode", "max_logprobs", "generation_config", "override_generation_config"),
    **_in("model_config", "logits_processors", "return_sampling_mask", "tokenizer", "tokenizer_mode"),
    **_in("model_config", "disable_sliding_window"),
    "lora": "lora_config",
}

NUMERIC = {
    **_in("model_config", "dtype", "quantization", "enforce_eager", "model_impl", "use_fp64_gumbel"),
    **_in("cache_config", "block_size", "enable_prefix_caching"),
    **_in("scheduler_config", "enable_chunked_prefill", "async_scheduling"),
    **_in("parallel_config", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
    **_in("device_config", "device"),
    "kv_cache_dtype": "cache_config/cache_dtype",
    "compilation_mode": "compilation_config/mode",
    "cudagraph_mode": "compilation_config/cudagraph_mode",
    "attention_backend": "attention_config/backend",
    "worker": "parallel_config/worker_cls",
    "worker_extension": "parallel_config/worker_extension_cls",
    "speculative": "speculative_config",
}

NUMERIC_ENVIRONMENT = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_ATTN_SPLIT_KV",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MARLIN_USE_ATOMIC_ADD",
    "VLLM_ROCM_USE_AITER",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_V2_MODEL_RUNNER",
)
"""The few of some 230 variables that pick another kernel or another order of summation."""

NUMERIC_SYSTEM = {
    "torch": "torch_version",
    "vllm": "vllm_version",
    "cuda": "cuda_runtime_version",
    "gpu": "nvidia_gpu_models",
}

DEPLOYMENT = {
    **_in("model_config", "max_model_len"),
    **_in("scheduler_config", "max_num_seqs", "max_num_batched_tokens"),
    **_in("cache_config", "num_gpu_blocks", "gpu_memory_utilization"),
    **_in("parallel_config", "data_parallel_size"),
    "executor": "parallel_config/distributed_executor_backend",
    "weight_transfer": "weight_transfer_config/backend",
}


KEPT_BACK = "kept_back"
"""The fact that a server has settings and does not show them to us: a route, and its status."""


class ServerInfo(msgspec.Struct):
    """The answer of /server_info?config_format=json."""

    vllm_config: dict[str, Any]
    vllm_env: dict[str, Any] = {}
    system_env: dict[str, Any] = {}

    @property
    def logprobs_mode(self) -> str | None:
        """`raw_` or `processed_`, `logprobs` or `logits`; None where the release does not show it."""
        return self._text("model_config/logprobs_mode")

    @property
    def transfer_engine(self) -> str | None:
        """The name in --weight-transfer-config; None without one."""
        return self._text("weight_transfer_config/backend")

    @property
    def instance(self) -> str | None:
        """Drawn anew at every start; None where the release does not show it."""
        return self._text("instance_id")

    def _text(self, path: str) -> str | None:
        value = look_up(self.vllm_config, path)
        return value if isinstance(value, str) else None


def logprob_kind(info: ServerInfo | None) -> LogprobKind:
    """What the server says that its logprobs are.

    A server that does not say is taken to keep the contract (processed): whether it does is what the audit tests.
    """
    if info is not None and (info.logprobs_mode or "").startswith("raw_"):
        return LogprobKind.RAW
    return LogprobKind.PROCESSED


def fingerprint(
    model: str,
    max_model_len: int,
    route: str,
    info: ServerInfo | None,
    release: str | None = None,
    *,
    kept_back: int | None = None,
) -> EngineFingerprint:
    """Who computes the numbers, as far as the server shows it, and how it is asked.

    Without dev mode that is the model's name and the release, as /version has it; `kept_back` is the status that
    came in place of the settings.
    """
    semantic, numeric = {"model": model}, {} if release is None else {"vllm": release}
    deployment = {"max_model_len": str(max_model_len), "route": route}
    if info is None and kept_back is not None:
        deployment[KEPT_BACK] = f"/server_info ({kept_back})"
    if info is not None:
        overrides = look_up(info.vllm_config, "model_config/hf_overrides")
        overrides = dict(overrides) if isinstance(overrides, dict) else {}
        numeric["head_dtype"] = as_fact(overrides.pop("head_dtype", "model"))
        # What is left of the overrides (rope, window, …) makes another model of the checkpoint.
        semantic["hf_overrides"] = as_fact(overrides)
        semantic |= facts_at(info.vllm_config, SEMANTIC)
        numeric |= facts_at(info.vllm_config, NUMERIC)
        numeric |= facts_at(info.vllm_env, {name: name for name in NUMERIC_ENVIRONMENT})
        numeric |= facts_at(info.system_env, NUMERIC_SYSTEM)
        numeric |= _machine(info.system_env)
        deployment |= facts_at(info.vllm_config, DEPLOYMENT)
    return EngineFingerprint(engine=ENGINE, semantic=semantic, numeric=numeric, deployment=deployment)


def _machine(system: Mapping[str, Any]) -> dict[str, str]:
    """The processor picks the kernels, and the number of threads the order of their sums."""
    found = {}
    for text, separator, wanted in (
        (system.get("cpu_info"), ":", {"Model name": "cpu"}),
        (system.get("env_vars"), "=", {"OMP_NUM_THREADS": "threads", "MKL_CBWR": "MKL_CBWR"}),
    ):
        for line in text.splitlines() if isinstance(text, str) else ():
            name, _, value = line.partition(separator)
            if name.strip() in wanted:
                found[wanted[name.strip()]] = value.strip()
    return found
