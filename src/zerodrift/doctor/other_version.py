"""A target that another vLLM will read than the one whose defaults and flags are in our tables.

What is written counts as ever. Where nothing is written and versions differ, the setting becomes unknown, and what
would have decided is said to be undecided instead of guessed.
"""

import re
from collections.abc import Mapping

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.setting import Origin, Reading, Target, Value, unknown
from zerodrift.doctor.tables import VLLM_VERSION

_OF_THIS_VERSION = ("refused", "engine_v1", "disable_cascade_attn")
"""What our tables say of flags and variables that exist or do something: true of that version alone."""
_DIFFER = frozenset(
    {
        "logprobs_mode",
        "generation_config",
        "max_logprobs",
        "seed",
        "prefix_caching",
        "async_scheduling",
        "chunked_prefill",
        "max_num_batched_tokens",
        "flashinfer_sampler",
        "cpu_attn_split_kv",
    }
)
"""Settings whose default has changed between versions; of the others it is that nothing was asked for."""


class OtherVersion:
    """`target`, as far as it can be judged without the defaults of that version."""

    def __init__(self, target: Target, version: str) -> None:
        self._target, self._version = target, version
        self.title = f"{target.title.partition(', defaults')[0]}, for vLLM {version}, some of whose defaults are not known here"

    def read(self) -> Reading:
        """Without the defaults that may be others there."""
        reading = self._target.read()
        settings = {
            name: unknown(name) if name in _DIFFER and setting.origin is Origin.DEFAULT else setting
            for name, setting in reading.settings.items()
            if name not in _OF_THIS_VERSION
        }
        return reading._replace(settings=settings)

    def typed(self, name: str, value: Value) -> str | None:
        """As the target writes it."""
        return self._target.typed(name, value)

    def corrected(self, changes: Mapping[str, Value]) -> "Target | None":
        """The corrected target, still for that version."""
        fixed = self._target.corrected(changes)
        return None if fixed is None else OtherVersion(fixed, self._version)

    def printed(self) -> str:
        """Its text without secrets."""
        return self._target.printed()


def of_version(target: Target, version: str) -> Target:
    """`target` itself where `version` is the one of our tables."""
    if (found := re.fullmatch(r"v?(\d+)\.(\d+)(\.\S*)?", version)) is None:
        raise ConfigError(
            f"--vllm-version {version!r} is no version; write it as {VLLM_VERSION} or {VLLM_VERSION}.0"
        )
    short = f"{int(found[1])}.{int(found[2])}"
    return target if short == VLLM_VERSION else OtherVersion(target, short)
