"""Is our plugin in the environment that vLLM is started from? If so, the server gets the flags that turn it on.

Asked of that environment's own interpreter, which alone knows what it would import; vLLM itself is not imported.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from zerodrift.backends.launch import environment
from zerodrift.backends.vllm_update import ENGINE, FLAGS
from zerodrift.core.errors import EngineError

PATIENCE_S = 60.0
"""An interpreter answers in 0.1 s; in 10 s on a machine that swaps."""

_QUESTION = """
import importlib.metadata, importlib.util, json, pathlib
plugins = [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
vllm = importlib.util.find_spec("vllm")
places = vllm.submodule_search_locations if vllm else []
# A release without transfer engines does not know the flag, and would not start.
can = any(pathlib.Path(place, "distributed", "weight_transfer").is_dir() for place in places)
print(json.dumps([plugins, can]))
"""


def transfer_flags(python: str | Path, env: Mapping[str, str]) -> list[str]:
    """What turns the transfer engine on; nothing where the plugin is not installed, or `env` leaves it out."""
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and ENGINE not in allowed.split(","):
        return []
    plugins, has_engines = _ask(python, env)
    return list(FLAGS) if ENGINE in plugins and has_engines else []


def _ask(python: str | Path, env: Mapping[str, str]) -> tuple[list[str], bool]:
    try:
        asked = subprocess.run(
            [str(python), "-c", _QUESTION],
            env=environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
        )
        plugins, has_engines = json.loads(asked.stdout)
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"{python} did not say within {PATIENCE_S:g} s what is installed beside it; is the machine overloaded?"
        ) from error
    except (OSError, subprocess.CalledProcessError, ValueError):
        # No interpreter at all: starting the server, which comes next, says so with more words.
        return [], False
    return plugins, has_engines
