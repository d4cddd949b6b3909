"""Is our plugin in the environment that vLLM is started from? If so, the server gets the flags that turn it on."""

from collections.abc import Mapping
from pathlib import Path

from zerodrift.backends.vllm_environment import VLLM, ask
from zerodrift.backends.vllm_update import ENGINE, FLAGS

_QUESTION = f"""{VLLM}
import importlib.metadata
plugins = [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
# A release without transfer engines does not know the flag, and would not start.
can = any(pathlib.Path(place, "distributed", "weight_transfer").is_dir() for place in places)
print(json.dumps(plugins if can else []))
"""


def transfer_flags(python: str | Path, env: Mapping[str, str]) -> list[str]:
    """What turns the transfer engine on; nothing where the plugin is not installed, or `env` leaves it out."""
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and ENGINE not in allowed.split(","):
        return []
    plugins = ask(python, env, _QUESTION)
    return list(FLAGS) if isinstance(plugins, list) and ENGINE in plugins else []
