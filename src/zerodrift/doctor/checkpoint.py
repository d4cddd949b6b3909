"""What do a model's own files decide where no flag does? Quantisation, and sampling defaults of requests.

Only a directory that is here can be looked into.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerodrift.doctor.setting import Origin, Setting, Value, unknown
from zerodrift.doctor.vllm_flags import merged

NAME = "checkpoint"
"""There, and unknown, where it is the checkpoint that hides a setting."""
FLAGS = frozenset({"hf-config-path", "hf-overrides"})
"""That decide which configuration is in force, and what of it."""
DEFAULTS = "generation_defaults"
DEFAULTS_FLAGS = frozenset({"generation-config", "hf-config-path", "override-generation-config"})
_CONFIG = "config.json"
_TEXT = "text_config"
_PARTS = ("quantization_config", "compression_config")
_MODELOPT = "hf_quant_config.json"
"""ModelOpt kept its part in a file of its own up to 0.29."""
_GENERATION = "generation_config.json"
_LEGACY = ("min_p",)
"""What vLLM takes from a config.json where there is no generation_config.json. Older transformers took temperature,
top_p, top_k and repetition_penalty from there as well; the 5.16 and later that vLLM 0.32 asks for drop them."""
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),  # both ask for all tokens
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
"""What vLLM takes from a generation_config.json, max_new_tokens apart, and values that change nothing."""
_CALLED_QUANTISED = re.compile(
    r"(?:^|[-_./])(?:nv|mx)?(?:fp[48]|awq|gptq|bnb|gguf|exl2|hqq|aqlm|nf4|int[48]|[48]-?bit|w[48]a\d+|q[2-8](?:_\w+)?"
    r"|quanti[sz]ed)(?:$|[-_./])",
    re.IGNORECASE,
)


def quantization(place: str | None, overridden: Mapping[str, Any]) -> Setting:
    """The method that the checkpoint at `place` is quantised with; vLLM asks for it where no flag names one.

    Which kernels then run it (awq, awq_marlin) is the device's to say.
    """
    if place is None or not (directory := Path(place)).is_dir():
        return unknown("quantization")
    config, modelopt = _json_file(directory, _CONFIG), _json_file(directory, _MODELOPT)
    # Without a config.json it is a checkpoint of another format, which is not read here.
    if config is None or modelopt is None or not (directory / _CONFIG).is_file():
        return unknown("quantization")
    if config.get("quantization_config") is None and modelopt:
        config["quantization_config"] = modelopt
    whole, text = config.get(_TEXT) or {}, overridden.get(_TEXT, {})
    replaced = [part for key in _PARTS if isinstance(part := overridden.get(key), dict)]
    # What vLLM makes of a part that is replaced by one that does not say how is not known here.
    if not (
        isinstance(whole, dict) and isinstance(text, dict) and all(p.get("quant_method") for p in replaced)
    ):
        return unknown("quantization")
    # vLLM merges overrides into a part that is a configuration of its own, and replaces all else.
    found = _part({**config, **overridden, _TEXT: merged(whole, text)})
    if found is not None and not isinstance(found, dict):
        return unknown("quantization")
    return Setting("quantization", None if found is None else _method(found), Origin.CHECKPOINT)


def is_suspicious(place: str | None) -> bool:
    """Whether it is called quantised, or should be a directory here and is not: then not seeing it decides."""
    if place is None or Path(place).is_dir():
        return False
    return place.startswith(("/", "./", "../", "~")) or _CALLED_QUANTISED.search(place) is not None


def generation_defaults(source: Value, model: str | None, overridden: Mapping[str, Any]) -> Setting:
    """What the file in force would change; `source` is what --generation-config says, or would say.

    `auto` is the model's own, `vllm` none, and anything else a directory or a name on the hub. A key that is
    overridden, be it with null, is not taken from there.
    """
    if source == "vllm":
        return Setting(DEFAULTS, None, Origin.SET)
    place = model if source == "auto" else source
    if not isinstance(place, str) or not (directory := Path(place)).is_dir():
        return unknown(DEFAULTS)
    written = _sampling(directory)
    if written is None:
        return unknown(DEFAULTS)
    changed = changing({name: value for name, value in written.items() if name not in overridden})
    return Setting(
        DEFAULTS, ", ".join(f"{name} {value}" for name, value in changed.items()) or None, Origin.SET
    )


def changing(written: Mapping[str, Any]) -> dict[str, Any]:
    """Those that change the distribution; null is as if it were not there."""
    return {
        name: written[name] for name, neutral in _NEUTRAL.items() if written.get(name) not in (None, *neutral)
    }


def _json_file(directory: Path, name: str) -> dict[str, Any] | None:
    """The object in that file: empty where there is no such file, None where it cannot be read as one."""
    try:
        written = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):  # the last of one that is nested too deeply
        return None
    return written if isinstance(written, dict) else None


def _part(config: Mapping[str, Any]) -> object:
    """Where it says how it is quantised: at the top, or of a model with eyes in the part that writes."""
    levels = [config, config[_TEXT]]
    return next((level[key] for level in levels for key in _PARTS if level.get(key) is not None), None)


def _method(found: Mapping[str, Any]) -> str | None:
    producer, inner = found.get("producer"), found.get("quantization")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        algorithm = inner.get("quant_algo") if isinstance(inner, dict) else None
        return "modelopt_fp4" if str(algorithm).upper() == "NVFP4" else "modelopt"
    method = str(found.get("quant_method") or "").lower()
    return method.replace("compressed_tensors", "compressed-tensors") or None


def _sampling(directory: Path) -> dict[str, Any] | None:
    """What the directory says of sampling; None where that cannot be read."""
    if (directory / _GENERATION).exists():
        return _json_file(directory, _GENERATION)
    config = _json_file(directory, _CONFIG)
    if config is None:
        return None
    text = config.get(_TEXT)
    levels = (text if isinstance(text, dict) else {}, config)
    return {name: level[name] for level in levels for name in _LEGACY if level.get(name) is not None}
