"""A Hydra file of PipelineRL: trainer, sampler, and the flags that its launcher hands to vLLM.

A file names what it changes; the rest comes from conf/base.yaml. Overrides on the command line are not seen here.
"""

import json
from collections.abc import Mapping
from typing import Any

from zerodrift.core.errors import ConfigError
from zerodrift.doctor import file_settings, vllm_settings
from zerodrift.doctor.setting import Origin, Setting, Value, gathered, unknown
from zerodrift.doctor.tables import PIPELINERL_VERSION, VLLM_VERSION, file_names, vllm_names
from zerodrift.doctor.target import Reading
from zerodrift.doctor.vllm_arguments import Parsed, parse
from zerodrift.doctor.yaml_text import YamlText

KWARGS = ("vllm_config", "vllm_kwargs")
# vllm_config.vllm_kwargs of conf/base.yaml.
BASE = gathered(
    Setting("logprobs_mode", "processed_logprobs", Origin.DEFAULT),
    Setting("generation_config", "vllm", Origin.DEFAULT),
    Setting("prefix_caching", value=False, origin=Origin.DEFAULT),
    Setting("async_scheduling", value=False, origin=Origin.DEFAULT),
    Setting("chunked_prefill", value=True, origin=Origin.DEFAULT),
    Setting("dtype", "bfloat16", Origin.DEFAULT),
    Setting("max_num_batched_tokens", 1024, Origin.DEFAULT),
    Setting("max_model_len", 10000, Origin.DEFAULT),
    Setting("return_tokens_as_token_ids", value=True, origin=Origin.DEFAULT),
)
# What the launcher passes whatever the file says; seeds are counted up from replica to replica.
LAUNCHED = gathered(
    Setting("quantization", "bf16_last_layer_fp32", Origin.FRAMEWORK),
    Setting("head_dtype", "float32", Origin.FRAMEWORK),
    Setting("trainer_head_dtype", "float32", Origin.FRAMEWORK),
    Setting("host", "0.0.0.0", Origin.FRAMEWORK),
    Setting("seed", None, Origin.FRAMEWORK),
)
SECTIONS = (
    "vllm_config",
    "finetune",
    "llm",
    "streams",
    "defaults",
    "max_lag",
    "use_fsdp",
    "model_path",
    "seed",
)


class PipelineRlFile:
    """Sections below sections; `defaults` lists the files that this one goes on top of."""

    title = f"PipelineRL file, defaults of PipelineRL {PIPELINERL_VERSION} and vLLM {VLLM_VERSION}"

    def __init__(self, text: YamlText) -> None:
        self._text = text
        self._names = file_names("pipelinerl")
        self._kwargs = self._read_kwargs()

    def read(self) -> Reading:
        """The servers as the launcher starts them, and the trainer that reads from them."""
        parsed = self._parsed()
        servers = vllm_settings.settings(parsed, {"CUDA_VISIBLE_DEVICES": "0"}, None, BASE.get) | LAUNCHED
        found = file_settings.settings(self._text, self._names) | servers
        found["stream"] = self._stream()
        elsewhere = {key.replace("_", "-") for key, value in self._kwargs.items() if _interpolated(value)}
        found |= {name: unknown(name) for name, spec in vllm_names().items() if spec.flag in elsewhere}
        rest = [str(key) for key in self._text.values if key not in SECTIONS]
        return Reading(found, (*vllm_settings.not_judged(parsed), *rest))

    def typed(self, name: str, value: Value) -> str | None:
        """The path with its value, as Hydra also takes it on the command line."""
        if name in LAUNCHED:
            return None
        if name in self._names:
            path, written = self._names[name].path, file_settings.value_in_file(self._names[name], value)
        else:
            flag = vllm_names()[name].flag if name in vllm_names() else None
            if flag is None:
                return None
            path, written = ".".join((*KWARGS, flag)), value
        return f"remove {path}" if written is None else f"{path}={json.dumps(written).strip(chr(34))}"

    def changed(self, changes: Mapping[str, Value]) -> str:
        """The file with these settings."""
        text = self._text
        for name, value in changes.items():
            if name in LAUNCHED:
                continue
            spec = vllm_names().get(name)
            if name in self._names or spec is None or spec.flag is None:
                text = file_settings.changed(text, self._names, {name: value})
                continue
            there = [key for key in self._kwargs if str(key).replace("_", "-") == spec.flag]
            path = [*KWARGS, there[-1] if there else spec.flag]
            text = text.without(path) if value is None else text.with_value(path, value)
        return text.without_secrets()

    def _read_kwargs(self) -> Mapping[str, Any]:
        there, kwargs = self._text.get(KWARGS)
        if not there or kwargs is None:
            return {}
        if not isinstance(kwargs, dict):
            raise ConfigError(
                f"{self._text.source}: {'.'.join(KWARGS)} is no mapping; its keys are flags of vLLM"
            )
        return kwargs

    def _parsed(self) -> Parsed:
        """As the launcher turns them into words: `false` into --no-KEY, nothing and "" into a bare flag."""
        words = []
        for key, value in self._kwargs.items():
            if isinstance(value, bool):
                words.append(f"--{key}" if value else f"--no-{key}")
            elif not _interpolated(value):
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


def _interpolated(value: object) -> bool:
    """`${actor.llm_max_rollouts}`: what it stands for is decided when all files are together."""
    return isinstance(value, str) and "${" in value
