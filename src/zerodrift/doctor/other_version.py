"""A target that another vLLM will read than the one whose defaults and flags are in our tables.

What is written counts as ever, unless that version is known not to have the flag. Where nothing is written and versions
differ, the default is the one that was read in that release; of a release that was not, the setting is unknown, and what would
have decided is said to be undecided instead of guessed.
"""

import re
from collections.abc import Mapping

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.setting import Origin, Reading, Setting, Target, Value, unknown
from zerodrift.doctor.tables import VLLM_VERSION, vllm_names, vllm_releases

_OF_THIS_VERSION = ("refused", "engine_v1", "disable_cascade_attn")
"""What our tables say of flags and variables that exist or do something: true of that version alone."""
DIFFER = frozenset(
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
        self._release = vllm_releases().get(version)
        known = "defaults of its parser" if self._release else "some of whose defaults are not known here"
        self.title = f"{target.title.partition(', defaults')[0]}, for vLLM {version}, {known}"

    def read(self) -> Reading:
        """Without the defaults that may be others there."""
        reading = self._target.read()
        settings = {
            name: self._default(name) if name in DIFFER and setting.origin is Origin.DEFAULT else setting
            for name, setting in reading.settings.items()
            if name not in _OF_THIS_VERSION
        }
        lacking = [name for name in settings if self._lacks(name) and settings[name].known]
        refused = [name for name in lacking if settings[name].origin is Origin.SET]
        settings = {name: setting for name, setting in settings.items() if name not in lacking}
        if refused:
            flags = ", ".join(f"--{vllm_names()[name].flag}" for name in refused)
            settings["refused"] = Setting("refused", f"vLLM {self._version} has no {flags}", Origin.SET)
        return reading._replace(settings=settings)

    def _default(self, name: str) -> Setting:
        if self._release is None or name not in self._release.defaults:
            return unknown(name)
        return Setting(name, self._release.defaults[name], Origin.DEFAULT)

    def _lacks(self, name: str) -> bool:
        spec = vllm_names().get(name)
        return self._release is not None and spec is not None and spec.flag in self._release.lacks

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
