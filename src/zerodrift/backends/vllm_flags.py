"""The command line that makes vLLM obey a configuration. What is None is left to vLLM; own arguments come last."""

import json
import re

from zerodrift.backends.vllm_environment import VLLM, ask
from zerodrift.backends.vllm_routes import FLAG
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError

# A release that does not know the flag would not start, and has the route open.
_KNOWS_FLAG = f"""{VLLM}
files = [file for place in places for file in pathlib.Path(place, "entrypoints").rglob("cli_args.py")]
name = {FLAG.removeprefix("--").replace("-", "_")!r}
print(json.dumps(any(name in file.read_text(encoding="utf-8") for file in files)))
"""

# Field -> flag that takes its value.
VALUES = {
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "logprobs_mode": "--logprobs-mode",
    "generation_config": "--generation-config",
    "kv_cache_dtype": "--kv-cache-dtype",
    "tensor_parallel_size": "--tensor-parallel-size",
}
# Field -> switch; False becomes its `--no-` form, because a default that is on stays on in silence otherwise.
SWITCHES = {
    "enable_chunked_prefill": "enable-chunked-prefill",
    "enable_prefix_caching": "enable-prefix-caching",
    "async_scheduling": "async-scheduling",
    "enforce_eager": "enforce-eager",
}
# Whole, dotted, with underscores, or shortened, which argparse allows: no other flag begins so.
_OVERRIDES = re.compile(r"--hf[-_]o")


def route_flags(config: EngineConfig) -> list[str]:
    """What opens the route that is asked; the environment's own vLLM says whether it has such a flag."""
    if config.route != "generate" or ask(config.python or "", config.env, _KNOWS_FLAG) is not True:
        return []
    return [FLAG]


def flags(config: EngineConfig, dtype: str) -> list[str]:
    """Arguments for the OpenAI server; argparse takes the last of two, so `config.args` wins."""
    arguments = ["--enable-prompt-tokens-details", "--dtype", dtype]
    for field, flag in VALUES.items():
        if (value := getattr(config, field)) is not None:
            arguments += [flag, str(value)]
    for field, switch in SWITCHES.items():
        if (wanted := getattr(config, field)) is not None:
            arguments.append(f"--{switch}" if wanted else f"--no-{switch}")
    check_overrides(config)
    if config.head_dtype != "auto":
        arguments += ["--hf-overrides", json.dumps({"head_dtype": config.head_dtype})]
    return [*arguments, *config.args]


def check_overrides(config: EngineConfig) -> None:
    """Refused: overrides of `args` beside a head dtype. vLLM does not merge the two, and would drop ours."""
    own = next((word for word in config.args if _OVERRIDES.match(word)), None)
    if own is not None and config.head_dtype != "auto":
        raise ConfigError(
            f"engine.args holds {own.partition('=')[0]} and engine.head_dtype is {config.head_dtype}, which needs that "
            f"flag too, and vLLM keeps one of the two; write head_dtype: {config.head_dtype} into the overrides of "
            "engine.args, and set engine.head_dtype to auto"
        )
