"""How is vLLM started in its own environment, so that it obeys a configuration?

What the environment holds is asked of its own interpreter, which alone knows what it would import; vLLM itself is not
imported. The server gets its caches below `.cache`, and no network.
"""

import json
import os
import re
import subprocess
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from zerodrift.backends.launch import LaunchedServer, free_port, launch
from zerodrift.backends.vllm_routes import FLAG
from zerodrift.backends.vllm_update import ENGINE, FLAGS
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError, EngineError

DEFAULTS = {
    # Without it neither settings, weights nor caches can be reached.
    "VLLM_SERVER_DEV_MODE": "1",
    # GiB of KV; the default asks for a share of the whole machine.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM would pin itself to cores that others use.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The working directory must not offer modules to the engine.
    "PYTHONSAFEPATH": "1",
}
"""Environment of a launched server; `env` overrides any of it."""

CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "vllm-config",
    "HF_HOME": "huggingface",
    "XDG_CACHE_HOME": "xdg",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
}

PATIENCE_S = 60.0
"""An interpreter answers in 0.1 s; in 10 s on a machine that swaps."""

VLLM = """
import importlib.util, json, pathlib
vllm = importlib.util.find_spec("vllm")
places = vllm.submodule_search_locations if vllm else []
"""
"""How a question begins: `places` are where vLLM's modules lie."""

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

_PLUGINS = f"""{VLLM}
import importlib.metadata
plugins = [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
# A release without transfer engines does not know the flag, and one that takes no other than its own refuses the
# name: neither would start.
can = any(
    pathlib.Path(place, "distributed", "weight_transfer").is_dir()
    and "] | str" in pathlib.Path(place, "config", "weight_transfer.py").read_text(encoding="utf-8")
    for place in places
)
print(json.dumps(plugins if can else []))
"""


def launch_vllm(
    python: str | Path,
    model: str | Path,
    args: Sequence[str],
    env: Mapping[str, str],
    log_path: Path,
    timeout_s: float = 300.0,
) -> LaunchedServer:
    """Start vLLM with the interpreter of its own environment, and return once it answers.

    `args` go to the server as they are, `env` on top of DEFAULTS. VLLM_* of our own environment stay here: a
    server that is audited is configured by what is written down, and by nothing else.
    """
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *args]
    return launch(command, environment(env), port, log_path, timeout_s)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """What a process of vLLM sees: ours without its VLLM_*, then DEFAULTS, then `env`."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_") and name not in ("PYTHONPATH", "PYTHONHOME")
    }
    root = Path(".cache").resolve()
    caches = {name: str(root / folder) for name, folder in CACHES.items()}
    return ours | DEFAULTS | caches | dict(env)


def route_flags(config: EngineConfig) -> list[str]:
    """What opens the route that is asked; the environment's own vLLM says whether it has such a flag."""
    if config.route != "generate" or ask(config.python or "", config.env, _KNOWS_FLAG) is not True:
        return []
    return [FLAG]


def flags(config: EngineConfig, dtype: str, unknown: Container[str] = ()) -> list[str]:
    """Arguments for the OpenAI server; argparse takes the last of two, so `config.args` wins.

    Of `unknown` fields (vllm_release) nothing is said: a server does not start with a flag that it does not know.
    """
    arguments = ["--enable-prompt-tokens-details", "--dtype", dtype]
    for field, flag in VALUES.items():
        if field not in unknown and (value := getattr(config, field)) is not None:
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


def transfer_flags(python: str | Path, env: Mapping[str, str]) -> list[str]:
    """What turns the transfer engine on; nothing where the plugin is not installed, or `env` leaves it out."""
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and ENGINE not in allowed.split(","):
        return []
    plugins = ask(python, env, _PLUGINS)
    return list(FLAGS) if isinstance(plugins, list) and ENGINE in plugins else []


def ask(python: str | Path, env: Mapping[str, str], question: str) -> object:
    """The JSON that `question`, a program, prints there; None where it cannot be run."""
    try:
        asked = subprocess.run(
            [str(python), "-c", question],
            env=environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
        )
        answer: object = json.loads(asked.stdout)
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"{python} did not say within {PATIENCE_S:g} s what is installed beside it; is the machine overloaded?"
        ) from error
    except (OSError, subprocess.CalledProcessError, ValueError):
        # No interpreter at all: starting the server, which comes next, says so with more words.
        return None
    return answer
