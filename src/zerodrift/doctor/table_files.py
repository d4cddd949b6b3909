"""What a table describes whole: files of verl and SkyRL, flags of OpenRLHF. What no row of the table names is said to be unread.

Judged are the settings that such a file can hold. What its framework sets beside them in the vLLM that it starts is not
known here, and not taken for vLLM's default either.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import vllm_settings
from zerodrift.doctor.setting import Origin, Reading, Setting, Value
from zerodrift.doctor.tables import (
    OPENRLHF_VERSION,
    SKYRL_VERSION,
    VERL_VERSION,
    framework_settings,
    vllm_names,
)
from zerodrift.doctor.trainer_files import NEAR, SettingsFile, WithVllmFlags

VLLM = "vllm"
ASK = "what the framework sets by itself: ask the server once it runs, zerodrift doctor http://HOST:PORT"
NO_SERVER = "what OpenRLHF sets by itself in engines that no address leads to: ask their rollouts, zerodrift blame DUMP --model CHECKPOINT"
_ENV = {"CUDA_VISIBLE_DEVICES": "0"}
"""Both frameworks start their engines on GPUs."""


class TableFile(WithVllmFlags):
    """Sampler and trainer by the table, and flags of vLLM where they stand."""

    engine: tuple[str, ...]
    """The key that names the engine; vLLM where it is not written."""
    emptied: tuple[tuple[str, ...], str]
    """A key that is on by default, and what it does to the prefix cache at an update."""

    def read(self) -> Reading:
        """Of an engine other than vLLM its sampler and trainer, for flags of vLLM mean nothing to it."""
        found = self._settings()
        engine = self._text.get(self.engine)
        others = engine not in (msgspec.UNSET, None, VLLM, "???")
        unread = list(_unread(self._text.values, self._read_paths()))
        if others:
            found = {name: each for name, each in found.items() if name not in vllm_names()}
            unread.append(f"{'.'.join(self.engine)}: {engine}, whose settings are not read")
        else:
            parsed = self._parsed()
            servers = vllm_settings.settings(parsed, _ENV, None, found.get)
            # A default of vLLM's says nothing here: the framework may have set it.
            found |= {
                name: each for name, each in servers.items() if name in found or each.origin is Origin.SET
            }
            unread += vllm_settings.not_judged(parsed)
        found |= self._cache_reset()
        return Reading(found, (*unread, ASK))

    def _path(self, name: str) -> tuple[str, ...] | None:
        """A flag below the others wins where one is there."""
        flag = self._flag_path(name)
        if flag is not None and self._text.get(flag) is not msgspec.UNSET:
            return flag
        return super()._path(name) if name in self._names else flag

    def _cache_reset(self) -> dict[str, Setting]:
        path, words = self.emptied
        written = self._text.get(path)
        if written is not msgspec.UNSET and written is not True:
            return {}
        origin = Origin.DEFAULT if written is msgspec.UNSET else Origin.SET
        return {"cache_reset": Setting("cache_reset", words, origin)}

    def _read_paths(self) -> frozenset[str]:
        paths = {spec.path for spec in self._names.values()}
        return frozenset(paths | {".".join(path) for path in (self.kwargs, self.engine, self.emptied[0])})


class VerlFile(TableFile):
    """Hydra: `actor_rollout_ref.rollout` is the sampler; overrides on the command line are not seen here."""

    title = f"verl file, defaults of verl {VERL_VERSION}"

    framework = "verl"
    kwargs = ("actor_rollout_ref", "rollout", "engine_kwargs", "vllm")
    engine = ("actor_rollout_ref", "rollout", "name")
    emptied = (
        ("actor_rollout_ref", "rollout", "free_cache_engine"),
        "the KV cache is freed after every generation",
    )


class SkyRlFile(TableFile):
    """`generator` is the sampler; overrides on the command line are not seen here."""

    title = f"SkyRL file, defaults of SkyRL {SKYRL_VERSION}"

    framework = "skyrl"
    kwargs = ("generator", "inference_engine", "engine_init_kwargs")
    engine = ("generator", "inference_engine", "backend")
    emptied = (("generator", "use_cache_salt"), "salted by weight version")


class OpenRlhfFlags(SettingsFile):
    """There is no file: `--rollout.top_p 0.9` is the key of that path, and what stands alone is on."""

    title = f"OpenRLHF, defaults of OpenRLHF {OPENRLHF_VERSION}"

    framework = "openrlhf"

    def read(self) -> Reading:
        """Sampler and trainer, and the vLLM that is started between them."""
        flat = [str(key) for key, value in self._text.values.items() if not isinstance(value, dict)]
        if older := set(flat) - {"local_rank", "use_ms"}:
            raise ConfigError(
                f"--{min(older)} is no flag of OpenRLHF {OPENRLHF_VERSION}, whose flags have a section before a dot "
                "(--rollout.temperature); those of older versions are not read here"
            )
        found = {**self._settings(), **framework_settings("openrlhf")}
        if found["correction"].value is True:
            found["logprobs_mode"] = Setting("logprobs_mode", "processed_logprobs", Origin.FRAMEWORK)
        else:
            del found["correction_mode"]
        if found["prefix_caching"].value is True:
            found["cache_reset"] = Setting("cache_reset", "with every update", Origin.FRAMEWORK)
        read = frozenset(spec.path for spec in self._names.values())
        return Reading(found, (*_unread(self._text.values, read), NO_SERVER))

    def typed(self, name: str, value: Value) -> str | None:
        """As a flag."""
        if (path := self._path(name)) is None:
            return None
        flag, written = f"--{'.'.join(path)}", self._in_file(name, value)
        if written is True:
            return flag
        return f"remove {flag}" if written in (False, None) else f"{flag} {written}"


def _unread(values: Mapping[Any, Any], read: frozenset[str], at: str = "") -> Iterator[str]:
    """Keys that nobody reads, each by the shortest path that holds nothing else."""
    for key, value in values.items():
        path = f"{at}{key}"
        if path in read:
            continue
        if isinstance(value, dict) and any(other.startswith(f"{path}.") for other in read):
            yield from _unread(value, read, f"{path}.")
        else:
            yield path + _near(path, read)


def _near(path: str, read: frozenset[str]) -> str:
    """What may have been meant, of the same section. A question: keys that no rule reads may be the framework's own."""
    section, _, key = path.rpartition(".")
    beside = [other.rpartition(".")[2] for other in read if other.rpartition(".")[0] == section]
    close = get_close_matches(key, beside, n=1, cutoff=NEAR)
    return f": no rule reads it; did you mean {close[0]}?" if close else ""
