"""What does a model's own directory decide where no flag does? Only one that is here can be looked into."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerodrift.doctor.setting import Origin, Setting, unknown
from zerodrift.doctor.vllm_arguments import merged

NAME = "checkpoint"
"""There, and unknown, where it is the checkpoint that hides a setting."""
FLAGS = frozenset({"hf-config-path", "hf-overrides"})
"""That decide which configuration is in force, and what of it."""
CONFIG = "config.json"
TEXT = "text_config"
_PARTS = ("quantization_config", "compression_config")
MODELOPT = "hf_quant_config.json"
"""ModelOpt kept its part in a file of its own up to 0.29."""


def json_file(directory: Path, name: str) -> dict[str, Any] | None:
    """The object in that file: empty where there is no such file, None where it cannot be read as one."""
    try:
        written = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):  # the last of one that is nested too deeply
        return None
    return written if isinstance(written, dict) else None


def quantization(place: str | None, overridden: Mapping[str, Any]) -> Setting:
    """The method that the checkpoint at `place` is quantised with; vLLM asks for it where no flag names one.

    Which kernels then run it (awq, awq_marlin) is the device's to say.
    """
    if place is None or not (directory := Path(place)).is_dir():
        return unknown("quantization")
    config, modelopt = json_file(directory, CONFIG), json_file(directory, MODELOPT)
    # Without a config.json it is a checkpoint of another format, which is not read here.
    if config is None or modelopt is None or not (directory / CONFIG).is_file():
        return unknown("quantization")
    if config.get("quantization_config") is None and modelopt:
        config["quantization_config"] = modelopt
    whole, text = config.get(TEXT) or {}, overridden.get(TEXT, {})
    if not isinstance(whole, dict) or not isinstance(text, dict) or _without_method(overridden):
        return unknown("quantization")
    # vLLM merges overrides into a part that is a configuration of its own, and replaces all else.
    found = _part({**config, **overridden, TEXT: merged(whole, text)})
    if found is None:
        return Setting("quantization", None, Origin.CHECKPOINT)
    if not isinstance(found, dict):
        return unknown("quantization")
    return Setting("quantization", _method(found), Origin.CHECKPOINT)


def _without_method(overridden: Mapping[str, Any]) -> bool:
    """Whether a part is replaced by one that does not say how: what vLLM makes of it is not known here."""
    parts = [part for key in _PARTS if isinstance(part := overridden.get(key), dict)]
    return any(not part.get("quant_method") for part in parts)


def _part(config: Mapping[str, Any]) -> object:
    """Where it says how it is quantised: at the top, or of a model with eyes in the part that writes."""
    for level in (config, config[TEXT]):
        for key in _PARTS:
            if level.get(key) is not None:
                return level[key]
    return None


def _method(found: Mapping[str, Any]) -> str | None:
    producer, inner = found.get("producer"), found.get("quantization")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        algorithm = inner.get("quant_algo") if isinstance(inner, dict) else None
        return "modelopt_fp4" if str(algorithm).upper() == "NVFP4" else "modelopt"
    method = str(found.get("quant_method") or "").lower()
    return method.replace("compressed_tensors", "compressed-tensors") or None
