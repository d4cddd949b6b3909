"""Which engine makes the rollouts, and under which settings?

Fields that vLLM also has carry vLLM's names. None always means the engine's own default: those change between
releases, so an audit reads back what is in force instead of assuming it.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.core.frozen import freeze
from zerodrift.core.secrets import names_a_secret

# Smallest sensible value of each count, and what it counts.
_COUNTS = {
    "concurrency": (1, "it counts requests that are sent together"),
    "max_model_len": (2, "it counts tokens, one of prompt and one of output at least"),
    "block_size": (1, "it counts tokens per KV block"),
    "max_num_seqs": (1, "it counts sequences in flight"),
    "max_num_batched_tokens": (1, "it counts tokens per step"),
    "tensor_parallel_size": (1, "it counts devices"),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine under audit: where it is, and what is asked of it."""

    name: str = "exact"
    """Which adapter speaks to it: `exact`, `reference`, `vllm`, `llama-cpp` or `sglang`."""
    url: str | None = None
    """Address of an engine that is already running; None starts one."""
    served_model: str | None = None
    """Which of the server's models to audit, by the name it has there; None: it serves one."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key; the key itself is never written down."""
    python: str | None = None
    """Interpreter of the environment that holds the engine, to start it there; never our own."""
    args: tuple[str, ...] = ()
    """Further arguments for starting the engine, passed on as they are."""
    env: Mapping[str, str] = {}
    """Environment variables for starting the engine, beside those that it needs anyway."""
    startup_timeout_s: float = 600.0
    """How long a started engine may take until it answers."""
    request_timeout_s: float = 300.0
    """How long one request may take."""
    route: Literal["completions", "generate"] = "completions"
    """Which of vLLM's routes is asked: /v1/completions, or /inference/v1/generate, for ids in and ids out."""
    concurrency: int = 32
    """Requests that are sent together; the rest wait here. Fewer for a server that refuses with 429."""

    max_model_len: int | None = None
    """Longest sequence that the engine accepts, prompt and output together."""
    block_size: int | None = None
    """Tokens per KV block."""
    max_num_seqs: int | None = None
    """Sequences in flight together."""
    max_num_batched_tokens: int | None = None
    """Tokens per step; a longer prompt is prefilled in chunks of this size."""
    enable_chunked_prefill: bool | None = None
    """Cut long prefills into chunks; where the cuts fall may change the last bits."""
    enable_prefix_caching: bool | None = False
    """Reuse the KV of equal prefixes; after a weight update they are stale unless salted or reset."""
    async_scheduling: bool | None = False
    """Plan a step while the last one runs; which sequences share a batch then depends on timing."""
    gpu_memory_utilization: float | None = None
    """Fraction of the device's memory that the engine may take (of the machine's, on CPU)."""
    tensor_parallel_size: int = 1
    """Devices that share each matmul; another number gives other bits."""
    enforce_eager: bool = False
    """Run without CUDA graphs and torch.compile."""

    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """Report the distribution sampled from, or the model's own; the trainer needs the first."""
    generation_config: Literal["vllm", "auto"] = "vllm"
    """`auto` fills in sampling defaults from the model's generation_config.json; `vllm` takes none from it."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Precision of the output head; float32 on one side alone makes the gap larger, not smaller."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Precision of stored keys and values; `auto` is the model's."""

    def __post_init__(self) -> None:
        """Settings that no engine could obey are refused before one is started."""
        freeze(self, "env")
        if not self.name:
            raise InvalidValue("name is empty; name the engine's adapter, for example vllm")
        for name in ("served_model", "api_key_env"):
            if getattr(self, name) == "":
                raise InvalidValue(f"{name} is an empty string; give a name, or leave it null")
        _check_address(self)
        _check_secrets(self)
        for name, (low, rule) in _COUNTS.items():
            if (value := getattr(self, name)) is not None:
                require.whole(InvalidValue, name, value, rule, low)
        for name in ("startup_timeout_s", "request_timeout_s"):
            require.real(InvalidValue, name, getattr(self, name), "it counts seconds, from 0.1 up", 0.1)
        if self.gpu_memory_utilization is not None:
            rule = "it is a fraction of memory from 0.01 to 1"
            require.real(InvalidValue, "gpu_memory_utilization", self.gpu_memory_utilization, rule, 0.01, 1)
        _check_step_budget(self)


def _check_address(engine: EngineConfig) -> None:
    address = engine.url
    if address is None:
        return
    if not address.startswith(("http://", "https://")):
        rest = address.rpartition("://")[2]
        raise InvalidValue(f"url is {address!r}, which is not HTTP; write http://{rest} or https://{rest}")
    if "@" in address.partition("://")[2].partition("/")[0]:
        # The configuration is written into the run directory, and run directories are shared.
        raise InvalidValue("url holds a user or password; leave it out, and name a variable in api_key_env")
    if engine.python is not None or engine.args:
        raise InvalidValue(
            f"url {engine.url!r} is an engine that runs already, while python={engine.python!r} and "
            f"args={list(engine.args)} are for starting one; keep one of the two"
        )


def _check_secrets(engine: EngineConfig) -> None:
    for name in engine.env:
        if names_a_secret(name, variable=True):
            raise InvalidValue(
                f"env holds {name}, which looks like a secret and would be written into the run directory; set it "
                "in the environment of zerodrift, which a started engine inherits"
            )
    for argument in engine.args:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and names_a_secret(flag):
            raise InvalidValue(
                f"args hold {flag}, whose value is a secret and would be written into the run directory; leave it "
                "out: an engine that zerodrift starts is reached from this machine alone"
            )


def _check_step_budget(engine: EngineConfig) -> None:
    budget = engine.max_num_batched_tokens
    if budget is None:
        return
    if engine.max_num_seqs is not None and budget < engine.max_num_seqs:
        raise InvalidValue(
            f"max_num_batched_tokens is {budget}, below max_num_seqs={engine.max_num_seqs}; "
            "every sequence in flight needs a token per step"
        )
    if (
        engine.enable_chunked_prefill is False
        and engine.max_model_len is not None
        and budget < engine.max_model_len
    ):
        raise InvalidValue(
            f"max_num_batched_tokens is {budget} and chunked prefill is off, so a prompt of "
            f"max_model_len={engine.max_model_len} fits in no step; raise the former or allow chunks"
        )
