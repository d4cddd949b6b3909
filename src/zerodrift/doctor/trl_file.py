"""The file of `trl grpo --config`, and of scripts that parse GRPOConfig: trainer and sampler in one."""

import json
from collections.abc import Mapping
from typing import Any

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import file_settings
from zerodrift.doctor.setting import Origin, Setting, Value, gathered
from zerodrift.doctor.tables import TRL_VERSION, VLLM_VERSION, file_names
from zerodrift.doctor.target import Reading
from zerodrift.doctor.yaml_text import YamlText

# What TRL passes to the vLLM that it starts in its own process, and what vLLM takes there by itself.
COLOCATED = gathered(
    Setting("logprobs_mode", "processed_logprobs", Origin.FRAMEWORK),
    Setting("max_num_batched_tokens", 4096, Origin.FRAMEWORK),
    Setting("prefix_caching", value=True, origin=Origin.DEFAULT),
    Setting("cache_reset", "after every update", Origin.FRAMEWORK),
    Setting("chunked_prefill", value=True, origin=Origin.DEFAULT),
    Setting("dtype", "auto", Origin.DEFAULT),
    Setting("head_dtype", "model", Origin.DEFAULT),
    Setting("kv_cache_dtype", "auto", Origin.DEFAULT),
)
OF_VLLM = (
    "structured_outputs",
    "tensor_parallel_size",
    "max_model_len",
    "sleep_mode",
    "correction",
    "correction_mode",
)
"""Mean something only with `use_vllm`."""
OF_COLOCATED = ("tensor_parallel_size", "max_model_len", "sleep_mode")
READ_TOO = {
    "use_vllm", "use_peft", "bf16", "fp16", "generation_kwargs", "load_in_8bit",
    "model_name_or_path", "output_dir", "learning_rate", "dataset_name",
}  # fmt: skip


class TrlFile:
    """Flat keys; what the file leaves out is TRL's default."""

    title = f"TRL file, defaults of TRL {TRL_VERSION} and vLLM {VLLM_VERSION}"

    def __init__(self, text: YamlText) -> None:
        self._text = text
        self._names = file_names("trl")

    def read(self) -> Reading:
        """Sampler, trainer, and the vLLM between them where TRL starts it."""
        values = self._text.values
        found = file_settings.settings(self._text, self._names)
        if not values.get("use_vllm"):
            found = {name: setting for name, setting in found.items() if name not in OF_VLLM}
            found["rollouts"] = Setting("rollouts", "transformers in the trainer", _said("use_vllm", values))
        elif found["rollouts"].value == "a server":
            found = {name: setting for name, setting in found.items() if name not in OF_COLOCATED}
            found["cache_reset"] = Setting("cache_reset", "answer not read", Origin.FRAMEWORK)
        else:
            found |= COLOCATED
        found["trainer_dtype"] = _precision(values)
        if not values.get("use_peft"):
            del found["lora_dropout"]
        if values.get("load_in_8bit"):
            found["trainer_quantised"] = Setting("trainer_quantised", value=True, origin=Origin.SET)
        found |= self._overrides(found)
        judged = {spec.path for spec in self._names.values()} | READ_TOO
        return Reading(found, tuple(str(key) for key in values if key not in judged))

    def typed(self, name: str, value: Value) -> str | None:
        """A line of the file."""
        if name not in self._names:
            return None
        spec = self._names[name]
        if value is None:
            return f"remove {spec.path}"
        return f"{spec.path}: {json.dumps(file_settings.value_in_file(spec, value)).strip(chr(34))}"

    def changed(self, changes: Mapping[str, Value]) -> str:
        """The file with these settings; what `generation_kwargs` overrides is changed there."""
        text = self._text
        inner = self._inner()
        for name, value in changes.items():
            if name in inner and isinstance(text.values["generation_kwargs"], str):
                inner = {**inner, name: value}
                text = text.with_value(["generation_kwargs"], json.dumps(inner))
            elif name in inner and name != "trainer_temperature":
                text = text.with_value(["generation_kwargs", name], value)
            elif name == "trainer_quantised":
                for key in ("load_in_4bit", "load_in_8bit"):
                    text = text.with_value([key], value=False) if text.values.get(key) else text
            else:
                text = file_settings.changed(text, self._names, {name: value})
        return text.without_secrets()

    def _overrides(self, found: Mapping[str, Setting]) -> dict[str, Setting]:
        """`generation_kwargs` win over the keys of their own name, in the sampler alone."""
        sampler = {*found, "presence_penalty", "frequency_penalty"}
        return {
            name: Setting(name, file_settings.plain(value), Origin.SET)
            for name, value in self._inner().items()
            if name in sampler
        }

    def _inner(self) -> dict[str, Any]:
        """`generation_kwargs`, as a mapping or as JSON in quotes."""
        overrides = self._text.values.get("generation_kwargs") or {}
        if isinstance(overrides, str):
            try:
                overrides = json.loads(overrides)
            except ValueError as error:
                raise ConfigError(f"{self._text.source}: generation_kwargs is not JSON ({error})") from error
        if not isinstance(overrides, dict):
            raise ConfigError(
                f"{self._text.source}: generation_kwargs is no mapping; write key: value below it"
            )
        return overrides


def _said(key: str, values: Mapping[Any, Any]) -> Origin:
    return Origin.SET if key in values else Origin.DEFAULT


def _precision(values: Mapping[Any, Any]) -> Setting:
    """TRL takes bf16 unless fp16 is asked for, or bf16 is refused."""
    if values.get("fp16"):
        return Setting("trainer_dtype", "float16", Origin.SET)
    bf16 = values.get("bf16")
    value = "float32" if bf16 is False else "bfloat16"
    return Setting("trainer_dtype", value, Origin.DEFAULT if bf16 is None else Origin.SET)
