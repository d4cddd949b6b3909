"""What does an older release of vLLM not know, of all that we would start it with?

Asked of its own sources, never of its version: forks and back-ports carry either under any number.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zerodrift.backends.vllm_launch import VLLM, ask
from zerodrift.config.engine import EngineConfig
from zerodrift.core.errors import ConfigError

_QUESTION = f"""{VLLM}
def knows(word, *patterns):
    files = [file for place in places for each in patterns for file in pathlib.Path(place).glob(each)]
    # What is not where it was looked for has moved since: a newer release.
    return not files or any(word in file.read_text(encoding="utf-8") for file in files)

print(json.dumps([
    knows("logprobs_mode", "engine/arg_utils.py"),
    # In the worker of 0.18, in a module of its own since.
    knows('"nobind"', "worker/*.py", "v1/worker/*.py", "platforms/*.py", "utils/*.py"),
]))
"""


class Release(NamedTuple):
    """What the vLLM of an environment knows."""

    logprobs_mode: bool
    """It can be told which logprobs to report. 0.8.5 cannot, and reports processed ones (docs/v0-v1.md)."""
    nobind: bool
    """The word by which it leaves its threads on whatever core they are; before it there was another."""

    @property
    def unknown_fields(self) -> frozenset[str]:
        """Of EngineConfig, those that it has no flag for."""
        return frozenset() if self.logprobs_mode else frozenset({"logprobs_mode"})

    @property
    def env(self) -> dict[str, str]:
        """Beside what every server is started with."""
        return {} if self.nobind else {"VLLM_CPU_OMP_THREADS_BIND": "all"}


def read_release(config: EngineConfig, python: str | Path, env: Mapping[str, str]) -> Release:
    """What is in the environment of `python`; all that is newest where it cannot be asked."""
    answer = ask(python, env, _QUESTION)
    release = Release(*answer) if isinstance(answer, list) else Release(logprobs_mode=True, nobind=True)
    if config.logprobs_mode != "processed_logprobs" and not release.logprobs_mode:
        raise ConfigError(
            f"engine.logprobs_mode is {config.logprobs_mode}, and the vLLM of {python} has no --logprobs-mode: it reports "
            "what it reports, which the audit finds out; leave the setting at processed_logprobs"
        )
    return release
