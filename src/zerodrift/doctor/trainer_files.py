"""Files of trainers: `trl grpo --config`, and Hydra files of PipelineRL. What is not written is the framework's default."""

import json
from collections.abc import Mapping
from typing import Any, Literal

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
    file_names,
    framework_settings,
    vllm_names,
)
from zerodrift.doctor.vllm_flags import Parsed, number, parse
from zerodrift.doctor.yaml_text import YamlText

OF_COLOCATED = {"tensor_parallel_size", "max_model_len", "sleep_mode"}
OF_VLLM = OF_COLOCATED | {"structured_outputs", "correction", "correction_mode"}
"""Mean something only with `use_vllm`."""
TRL_READ_TOO = {
    "use_vllm", "use_peft", "bf16", "fp16", "generation_kwargs", "load_in_8bit",
    "model_name_or_path", "output_dir", "learning_rate", "dataset_name",
}  # fmt: skip
KWARGS = ("vllm_config", "vllm_kwargs")
SECTIONS = {
    "vllm_config", "finetune", "llm", "streams", "defaults", "max_lag", "use_fsdp", "model_path", "seed",
}  # fmt: skip


class SettingsFile:
    """A YAML file in which each setting has a path of keys."""

    title: str

    def __init__(self, text: YamlText, framework: Literal["trl", "pipelinerl", "zerodrift"]) -> None:
        self._text = text
        self._framework = framework
        self._names = file_names(framework)

    def typed(self, name: str, value: Value) -> str | None:
        """The path with its value: as a line, or as an override on the command line where the framework has those."""
        if name not in self._names:
            return None
        return self._line(self._names[name].path, _in_file(self._names[name], value))

    def printed(self) -> str:
        """The file without secrets."""
        return self._text.printed()

    @property
    def hides(self) -> bool:
        """Whether something in it is not printed."""
        return self.printed() != self._text.text

    def _line(self, path: str, value: Value) -> str:
        if value is None:
            return f"remove {path}"
        return f"{path}{': ' if self._framework == 'trl' else '='}{json.dumps(value).strip(chr(34))}"

    def _with(self, changes: Mapping[str, Value], others: Mapping[tuple[str, ...], Value]) -> YamlText | None:
        """The text with those of `changes` that it has a place for, and other paths."""
        values = {
            tuple(self._names[name].path.split(".")): _in_file(self._names[name], value)
            for name, value in changes.items()
            if name in self._names
        }
        return self._text.with_values({**values, **others}, {})

    def _settings(self) -> dict[str, Setting]:
        """One setting per name, in that order."""
        found: dict[str, Setting] = {}
        for name, spec in self._names.items():
            there, value = self._text.get(spec.path.split("."))
            found[name] = self._read_value(name, value, found) if there else _default(name, spec, found)
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

    def __init__(self, text: YamlText) -> None:
        super().__init__(text, "trl")

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
        judged = {spec.path for spec in self._names.values()} | TRL_READ_TOO
        return Reading(found, tuple(str(key) for key in values if key not in judged))

    def corrected(self, changes: Mapping[str, Value]) -> "TrlFile | None":
        """What `generation_kwargs` overrides is changed there, if it is no JSON between quotes."""
        inner, values = self._inner(), self._text.values
        others: dict[tuple[str, ...], Value] = {}
        if "trainer_quantised" in changes:
            others = {(key,): False for key in ("load_in_4bit", "load_in_8bit") if values.get(key)}
        overridden = {
            name: value for name, value in changes.items() if name in inner and name != "trainer_temperature"
        }
        if not isinstance(values.get("generation_kwargs"), str):
            others |= {("generation_kwargs", name): value for name, value in overridden.items()}
        alone = {
            name: value for name, value in changes.items() if name not in (*overridden, "trainer_quantised")
        }
        text = self._with(alone, others)
        return None if text is None else TrlFile(text)

    def _inner(self) -> dict[str, Any]:
        """`generation_kwargs`, as a mapping or as JSON in quotes."""
        overrides = self._text.values.get("generation_kwargs") or {}
        if isinstance(overrides, str):
            try:
                overrides = json.loads(overrides)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{self._text.source}: generation_kwargs is not JSON") from error
        if not isinstance(overrides, dict):
            raise ConfigError(
                f"{self._text.source}: generation_kwargs is no mapping; write key: value below it"
            )
        return overrides


class PipelineRlFile(SettingsFile):
    """Sections below sections: trainer, sampler, and the flags that the launcher hands to vLLM.

    A file names what it changes; the rest comes from conf/base.yaml. Overrides on the command line are not seen here.
    """

    title = f"PipelineRL file, defaults of PipelineRL {PIPELINERL_VERSION} and vLLM {VLLM_VERSION}"

    def __init__(self, text: YamlText) -> None:
        super().__init__(text, "pipelinerl")
        there, kwargs = text.get(KWARGS)
        if there and kwargs is not None and not isinstance(kwargs, dict):
            raise ConfigError(f"{text.source}: {'.'.join(KWARGS)} is no mapping; its keys are flags of vLLM")
        self._kwargs: Mapping[str, Any] = kwargs or {}

    def read(self) -> Reading:
        """The servers as the launcher starts them, and the trainer that reads from them."""
        parsed = self._parsed()
        unseen = {key.replace("_", "-") for key, value in self._kwargs.items() if _is_interpolated(value)}
        env = {"CUDA_VISIBLE_DEVICES": "0"}
        servers = vllm_settings.settings(parsed, env, None, framework_settings("pipelinerl").get, unseen)
        found = self._settings() | servers | _launched()
        found["stream"] = self._stream()
        rest = [str(key) for key in self._text.values if key not in SECTIONS]
        return Reading(found, (*vllm_settings.not_judged(parsed), *rest))

    def typed(self, name: str, value: Value) -> str | None:
        """As Hydra also takes it on the command line."""
        flag = vllm_names()[name].flag if name in vllm_names() else None
        if name in _launched() or name in self._names or flag is None:
            return None if name in _launched() else super().typed(name, value)
        return self._line(".".join((*KWARGS, flag)), value)

    def corrected(self, changes: Mapping[str, Value]) -> "PipelineRlFile | None":
        """Flags of vLLM are changed below vllm_kwargs."""
        own = {
            name: value for name, value in changes.items() if name in self._names and name not in _launched()
        }
        others: dict[tuple[str, ...], Value] = {}
        for name, value in changes.items():
            flag = vllm_names()[name].flag if name in vllm_names() else None
            if flag is not None and name not in own and name not in _launched():
                there = [key for key in self._kwargs if str(key).replace("_", "-") == flag]
                others[(*KWARGS, there[-1] if there else flag)] = value
        text = self._with(own, others)
        return None if text is None else PipelineRlFile(text)

    def _parsed(self) -> Parsed:
        """As the launcher turns them into words: `false` into --no-KEY, nothing and "" into a bare flag."""
        words = []
        for key, value in self._kwargs.items():
            if isinstance(value, bool):
                words.append(f"--{key}" if value else f"--no-{key}")
            elif not _is_interpolated(value):
                words.append(f"--{key}" if value in (None, "") else f"--{key}={value}")
        return parse(words)

    def _stream(self) -> Setting:
        """`streams: redis` among the defaults, or a backend of its own."""
        there, backend = self._text.get(("streams", "backend"))
        if there:
            return Setting("stream", str(backend), Origin.SET)
        listed = self._text.values.get("defaults")
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, dict) and "streams" in entry:
                return Setting("stream", str(entry["streams"]), Origin.SET)
        return Setting("stream", "files", Origin.DEFAULT)


def _launched() -> dict[str, Setting]:
    """What PipelineRL's launcher passes whatever the file says."""
    every = framework_settings("pipelinerl")
    return {name: each for name, each in every.items() if each.origin is Origin.FRAMEWORK}


def plain(value: Any) -> Value:
    """A YAML value as a setting: structures are named by what they hold."""
    if isinstance(value, dict | list):
        return ", ".join(map(str, value)) or None
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _in_file(spec: FileName, value: Value) -> Value:
    """`value` in the file's own words."""
    for word, meaning in spec.values.items():
        if meaning == value:
            return {"true": True, "false": False}.get(word, word)
    return value


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
