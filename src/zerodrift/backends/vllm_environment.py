"""What does the environment hold that vLLM is started from?

Asked of that environment's own interpreter, which alone knows what it would import; vLLM itself is not imported.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from zerodrift.backends.launch import environment
from zerodrift.core.errors import EngineError

PATIENCE_S = 60.0
"""An interpreter answers in 0.1 s; in 10 s on a machine that swaps."""

VLLM = """
import importlib.util, json, pathlib
vllm = importlib.util.find_spec("vllm")
places = vllm.submodule_search_locations if vllm else []
"""
"""How a question begins: `places` are where vLLM's modules lie."""


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
