"""How is llama.cpp started in its own environment, so that it obeys a configuration?

The server is that of the xllamacpp wheel, run by `llama_cpp_serve.py` with the wheel's interpreter. What llama.cpp
has no switch for is refused: a setting that is written down and not obeyed would be believed.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerodrift.backends.launch import LaunchedServer, free_port, launch
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError, ModelNotFound

SCRIPT = Path(__file__).with_name("llama_cpp_serve.py")
SLOTS = 4
"""Sequences in flight together, as llama.cpp's own server has by default."""

ONE_THREAD = ("cpuparams.n_threads=1", "cpuparams_batch.n_threads=1")
"""llama.cpp would take every core of a machine that others use."""
NO_CACHE = ("cache_prompt=false", "cache_ram_mib=0")
NEUTRAL = ("sampling.temp=1", "sampling.top_k=0", "sampling.top_p=1", "sampling.min_p=0")
"""llama.cpp by itself cuts off at top-k 40, top-p 0.95 and min-p 0.05."""

NOT_OBEYED = (
    "block_size",
    "enable_chunked_prefill",
    "async_scheduling",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enforce_eager",
    "head_dtype",
    "kv_cache_dtype",
)


def settings(config: EngineConfig, dtype: str) -> list[str]:
    """NAME=VALUE for the server; the last of two wins, so `config.args` do."""
    defaults = EngineConfig()
    for name in NOT_OBEYED:
        if (value := getattr(config, name)) not in (None, getattr(defaults, name)):
            raise ConfigError(
                f"engine.{name} is {value!r}, and llama.cpp has no such setting; leave it out, or give llama.cpp's "
                "own: --set 'engine.args=[cache_type_k=0, cache_type_v=0]'"
            )
    if dtype != "auto":
        raise ConfigError(
            f"model.dtype is {dtype!r}, and a GGUF file has a type of its own; leave it at auto, or convert the file"
        )
    slots = config.max_num_seqs or SLOTS
    chosen = [*ONE_THREAD, f"n_parallel={slots}"]
    if config.max_model_len is not None:
        # The context is shared out among the slots.
        chosen.append(f"n_ctx={config.max_model_len * slots}")
    if config.max_num_batched_tokens is not None:
        chosen.append(f"n_batch={config.max_num_batched_tokens}")
    if config.enable_prefix_caching is False:
        chosen += NO_CACHE
    if config.generation_config == "vllm":
        chosen += NEUTRAL
    return [*chosen, *config.args]


def launch_llama_cpp(
    python: str | Path,
    model: str | Path,
    args: Sequence[str],
    env: Mapping[str, str],
    log_path: Path,
    timeout_s: float = 300.0,
) -> LaunchedServer:
    """Start llama.cpp on a GGUF file, and return once it answers."""
    if not Path(model).is_file():
        raise ModelNotFound(f"{model} is no file; llama.cpp serves a GGUF file: give one as MODEL")
    port = free_port()
    # Isolated: neither the folder of the script nor our environment offers it modules.
    command = [str(python), "-I", str(SCRIPT), str(model), str(port), *args]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    return launch(command, ours | dict(env), port, log_path, timeout_s)
