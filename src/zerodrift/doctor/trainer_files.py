"""Files of trainers: `trl grpo --config`, and Hydra files of PipelineRL. What is not written is the framework's default."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Self

import msgspec

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import vllm_settings
from zerodrift.doctor.setting import Origin, Reading, Setting, Value, unknown
from zerodrift.doctor.tables import (
    PIPELINERL_VERSION,
    TRL_VERSION,
    UNWRITTEN,
    VLLM_VERSION,
    FileName,
    FrameworkName,
    file_names,
    framework_settings,
    trl_keys,
    vllm_names,
)
from zerodrift.doctor.vllm_flags import Parsed, number, parse
from zerodrift.doctor.yaml_text import YamlText

OF_COLOCATED = {"tensor_parallel_size", "max_model_len", "sleep_mode"}
OF_VLLM = OF_COLOCATED | {"structured_outputs", "correction", "correction_mode"}
"""Mean something only with `use_vllm`."""
TRL_TOO = {
    "use_vllm", "use_peft", "bf16", "fp16", "generation_kwargs", "load_in_8bit", "model_name_or_path", "output_dir",
    "learning_rate", "dataset_name", "num_generations", "per_device_train_batch_size", "reward_funcs",
    "gradient_accumulation_steps",
}  # fmt: skip
"""Keys by which a TRL file is known too, and which say nothing that is judged by itself."""
_INNER = "generation_kwargs"
NEAR = 0.8
"""Of difflib's likeness: one wrong letter of five. Below it, names that TRL has had are taken for one another."""
SECTIONS = {
    "vllm_config", "finetune", "llm", "streams", "defaults", "max_lag", "use_fsdp", "model_path", "seed",
}  # fmt: skip


class SettingsFile:
    """A YAML file in which each setting has a path of keys."""

    title: str
    framework: FrameworkName

    def __init__(self, text: YamlText) -> None:
        self._text = text
        self._names = file_names(self.framework)

    def typed(self, name: str, value: Value) -> str | None:
        """The path with its value: as a line, or as an override on the command line where the framework has those."""
        if (path := self._path(name)) is None:
            return None
        if (written := self._in_file(name, value)) is None:
            return f"remove {'.'.join(path)}"
        between = ": " if self.framework == "trl" else "="
        return f"{'.'.join(path)}{between}{json.dumps(written).strip(chr(34))}"

    def corrected(self, changes: Mapping[str, Value]) -> Self | None:
        """Those that have a path here."""
        places = {
            path: self._in_file(name, value)
            for name, value in changes.items()
            if (path := self._path(name)) is not None
        }
        text = self._text.with_values(places, {})
        return None if text is None else type(self)(text)

    def printed(self) -> str:
        """The file without secrets."""
        return self._text.printed()

    def _path(self, name: str) -> tuple[str, ...] | None:
        """Where a setting is written; None where it cannot be."""
        return tuple(self._names[name].path.split(".")) if name in self._names else None

    def _in_file(self, name: str, value: Value) -> Value:
        """`value` in the file's own words."""
        words = self._names[name].values if name in self._names else {}
        word = next((word for word, meaning in words.items() if meaning == value), value)
        return {"true": True, "false": False}.get(word, number(word)) if isinstance(word, str) else word

    def _settings(self) -> dict[str, Setting]:
        """One setting per name, in that order."""
        found: dict[str, Setting] = {}
        for name, spec in self._names.items():
            value = self._text.get(spec.path.split("."))
            written = value is not msgspec.UNSET
            found[name] = self._read_value(name, value, found) if written else _default(name, spec, found)
        return found

    def _read_value(self, name: str, value: Any, found: Mapping[str, Setting]) -> Setting:
        spec = self._names[name]
        if _is_interpolated(value):
            return self._pointed_at(name, value, found)
        word = str(value).lower() if isinstance(value, bool) else value
        if isinstance(word, str) and word in spec.values:
            return Setting(name, spec.values[word], Origin.SET)
        if isinstance(value, str) and isinstance(spec.default, bool):
            value = {"true": True, "false": False}.get(value.lower(), value)
        elif isinstance(value, str) and isinstance(spec.default, int | float):
            value = number(value)
        # null asks for the default of most frameworks; where null is the default it means none.
        if value is None and spec.default is not None:
            return _default(name, spec, found)
        return Setting(name, plain(value), Origin.SET)

    def _pointed_at(self, name: str, value: str, found: Mapping[str, Setting]) -> Setting:
        """`${..llm.parameters.temperature}` is that setting, as far as it is known; no other can be followed from here."""
        target = value.removeprefix("${").removesuffix("}").lstrip(".")
        for other, spec in self._names.items():
            if other in found and (spec.path == target or spec.path.endswith(f".{target}")):
                return msgspec.structs.replace(found[other], name=name)
        return unknown(name)


class TrlFile(SettingsFile):
    """Flat keys: trainer and sampler in one."""

    title = f"TRL file, defaults of TRL {TRL_VERSION} and vLLM {VLLM_VERSION}"

    framework = "trl"

    def read(self) -> Reading:
        """Sampler, trainer, and the vLLM between them where TRL starts it."""
        values = self._text.values
        found = self._settings()
        if not values.get("use_vllm"):
            found = {name: setting for name, setting in found.items() if name not in OF_VLLM}
            origin = Origin.SET if "use_vllm" in values else Origin.DEFAULT
            found["rollouts"] = Setting("rollouts", "transformers in the trainer", origin)
        elif found["rollouts"].value == "a server":
            found = {name: setting for name, setting in found.items() if name not in OF_COLOCATED}
            found["cache_reset"] = Setting("cache_reset", "answer not read", Origin.FRAMEWORK)
        else:
            found |= framework_settings("trl")
        found["trainer_dtype"] = _precision(values)
        if not values.get("use_peft"):
            del found["lora_dropout"]
        if values.get("load_in_8bit"):
            found["trainer_quantised"] = Setting("trainer_quantised", value=True, origin=Origin.SET)
        # `generation_kwargs` win over the keys of their own name, in the sampler alone.
        sampler = {*found, "presence_penalty", "frequency_penalty"}
        inner = {name: plain(value) for name, value in self._inner().items() if name in sampler}
        found |= {name: Setting(name, value, Origin.SET) for name, value in inner.items()}
        judged = {spec.path for spec in self._names.values()} | TRL_TOO
        return Reading(found, tuple(_unread(str(key)) for key in values if key not in judged))

    def _path(self, name: str) -> tuple[str, ...] | None:
        """What `generation_kwargs` override is changed there, if they are no JSON between quotes."""
        if name == "trainer_quantised" and self._text.values.get("load_in_8bit"):
            return ("load_in_8bit",)
        if name in self._inner() and name != "trainer_temperature":
            return None if isinstance(self._text.values[_INNER], str) else (_INNER, name)
        return super()._path(name)

    def _inner(self) -> dict[str, Any]:
        """`generation_kwargs`, as a mapping or as JSON in quotes."""
        overrides = self._text.values.get(_INNER) or {}
        if isinstance(overrides, str):
            try:
                overrides = json.loads(overrides)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{self._text.source}: {_INNER} is not JSON") from error
        if not isinstance(overrides, dict):
            raise ConfigError(f"{self._text.source}: {_INNER} is no mapping; write key: value below it")
        return overrides


class WithVllmFlags(SettingsFile):
    """A file with a place for flags of vLLM, which the framework hands on."""

    kwargs: tuple[str, ...]
    """Where they stand."""

    def __init__(self, text: YamlText) -> None:
        super().__init__(text)
        given = text.get(self.kwargs) or {}
        if not isinstance(given, dict):
            raise ConfigError(
                f"{text.source}: {'.'.join(self.kwargs)} is no mapping; its keys are flags of vLLM"
            )
        self._kwargs: Mapping[str, Any] = given

    def _flag_path(self, name: str) -> tuple[str, ...] | None:
        """Where a flag of vLLM is written; None where the setting is none."""
        flag = vllm_names()[name].flag if name in vllm_names() else None
        if flag is None:
            return None
        there = [key for key in self._kwargs if str(key).replace("_", "-") == flag]
        return (*self.kwargs, there[-1] if there else flag)

    def _parsed(self) -> Parsed:
        """As a launcher turns them into words: `false` into --no-KEY, nothing and "" into a bare flag, a mapping into JSON."""
        words = []
        for key, value in self._kwargs.items():
            name = str(key).replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, dict):
                words.append(f"--{name}={json.dumps(value)}")
            else:
                words.append(f"--{name}" if value in (None, "") else f"--{name}={value}")
        return parse(words)


class PipelineRlFile(WithVllmFlags):
    """Sections below sections: trainer, sampler, and the flags that the launcher hands to vLLM.

    A file names what it changes; the rest comes from conf/base.yaml. Overrides on the command line are not seen here.
    """

    title = f"PipelineRL file, defaults of PipelineRL {PIPELINERL_VERSION} and vLLM {VLLM_VERSION}"

    framework = "pipelinerl"
    kwargs = ("vllm_config", "vllm_kwargs")

    def read(self) -> Reading:
        """The servers as the launcher starts them, and the trainer that reads from them."""
        parsed = self._parsed()
        env = {"CUDA_VISIBLE_DEVICES": "0"}
        servers = vllm_settings.settings(parsed, env, None, framework_settings("pipelinerl").get)
        found = self._settings() | servers | _launched()
        found["stream"] = self._stream()
        rest = [str(key) for key in self._text.values if key not in SECTIONS]
        return Reading(found, (*vllm_settings.not_judged(parsed), *rest))

    def _path(self, name: str) -> tuple[str, ...] | None:
        """Flags of vLLM stand below vllm_kwargs; what the launcher passes itself stands nowhere."""
        if name in _launched():
            return None
        return super()._path(name) if name in self._names else self._flag_path(name)

    def _stream(self) -> Setting:
        """`streams: redis` among the defaults, or a backend of its own."""
        if (backend := self._text.get(("streams", "backend"))) is not msgspec.UNSET:
            return Setting("stream", str(backend), Origin.SET)
        listed = self._text.values.get("defaults")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and "streams" in entry:
                return Setting("stream", str(entry["streams"]), Origin.SET)
        return Setting("stream", "files", Origin.DEFAULT)


def _unread(key: str) -> str:
    """A key that no rule reads; one that TRL does not have, with the one that may have been meant."""
    close = (
        [] if key in trl_keys() else get_close_matches(key.replace("-", "_"), trl_keys(), n=1, cutoff=NEAR)
    )
    return f"{key}, which TRL {TRL_VERSION} does not have; did you mean {close[0]}?" if close else key


def _launched() -> dict[str, Setting]:
    """What PipelineRL's launcher passes whatever the file says."""
    every = framework_settings("pipelinerl")
    return {name: each for name, each in every.items() if each.origin is Origin.FRAMEWORK}


def plain(value: Any) -> Value:
    """A YAML value as a setting: structures are named by what they hold."""
    if isinstance(value, dict | list):
        return ", ".join(map(str, value)) or None
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _default(name: str, spec: FileName, found: Mapping[str, Setting]) -> Setting:
    if spec.default == UNWRITTEN:
        return unknown(name)
    if isinstance(spec.default, str) and spec.default.startswith("$"):
        source = found[spec.default[1:]]
        return Setting(name, source.value, Origin.DEFAULT if source.known else Origin.UNKNOWN)
    return Setting(name, spec.default, Origin.DEFAULT)


def _is_interpolated(value: object) -> bool:
    """`${actor.llm_max_rollouts}`: what it stands for is decided when all files are together."""
    return isinstance(value, str) and "${" in value


def _precision(values: Mapping[Any, Any]) -> Setting:
    """TRL takes bf16 unless fp16 is asked for, or bf16 is refused."""
    if values.get("fp16"):
        return Setting("trainer_dtype", "float16", Origin.SET)
    bf16 = values.get("bf16")
    return Setting(
        "trainer_dtype",
        "float32" if bf16 is False else "bfloat16",
        Origin.DEFAULT if bf16 is None else Origin.SET,
    )
