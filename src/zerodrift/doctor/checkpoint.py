"""What do a model's own files decide where no flag does? Quantisation, and sampling defaults of requests.

Only a directory that is here can be looked into; what an override changes there is left unknown.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerodrift.doctor.secrets import safe
from zerodrift.doctor.setting import Origin, Setting, Value, unknown

NAME = "checkpoint"
"""There, and unknown, where it is the checkpoint that hides a setting."""
FLAGS = ("hf-config-path", "hf-overrides")
"""That decide which configuration is in force, and what of it."""
DEFAULTS = "generation_defaults"
DEFAULTS_FLAGS = ("generation-config", "hf-config-path", "override-generation-config")
_TEXT = "text_config"
_PARTS = ("quantization_config", "compression_config")
_MODELOPT = "hf_quant_config.json"
"""ModelOpt kept its part in a file of its own up to 0.29."""
NEUTRAL: dict[str, tuple[float, ...]] = {
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
    config = None if place is None else _json_file(Path(place) / "config.json")
    # Without a config.json it is a checkpoint of another format, which is not read here.
    if place is None or config is None or _is_overridden(overridden):
        return unknown("quantization")
    # At the top, or of a model with eyes in the part that writes.
    text = config.get(_TEXT)
    levels = [config, text if isinstance(text, dict) else {}]
    part = next((level[key] for level in levels for key in _PARTS if level.get(key) is not None), None)
    if part is None and (Path(place) / _MODELOPT).exists():
        part = {"quant_method": "modelopt"}
    if not isinstance(part, dict | None):
        return unknown("quantization")
    method = (
        str((part or {}).get("quant_method") or "")
        .lower()
        .replace("compressed_tensors", "compressed-tensors")
    )
    return Setting("quantization", method or None, Origin.CHECKPOINT)


def is_suspicious(place: str | None, overridden: Mapping[str, Any]) -> bool:
    """Whether not seeing it decides: it is overridden, or called quantised, or should be a directory here and is not."""
    if _is_overridden(overridden):
        return True
    if place is None or Path(place).is_dir():
        return False
    return _is_a_path(place) or _CALLED_QUANTISED.search(place) is not None


def missing(place: str | None) -> list[str]:
    """What to say of a model that is written as a directory, and is none here."""
    if place is None or not _is_a_path(place) or Path(place).is_dir():
        return []
    return [
        f"{safe(place)}: no directory here, so that its quantisation and its sampling defaults are not known"
    ]


def _is_a_path(place: str) -> bool:
    return place.startswith(("/", "./", "../", "~"))


def generation_defaults(source: Value, model: str | None, overridden: Mapping[str, Any]) -> Setting:
    """What the file in force would change; `source` is what --generation-config says, or would say.

    `auto` is the model's own, `vllm` none, and anything else a directory or a name on the hub. A key that is
    overridden, be it with null, is not taken from there.
    """
    if source == "vllm":
        return Setting(DEFAULTS, None, Origin.SET)
    place = model if source == "auto" else source
    if not isinstance(place, str) or not Path(place).is_dir():
        return unknown(DEFAULTS)
    file = Path(place) / "generation_config.json"
    written = _json_file(file) if file.exists() else {}
    if written is None:
        return unknown(DEFAULTS)
    changed = changing({name: value for name, value in written.items() if name not in overridden})
    said = ", ".join(f"{name} {value}" for name, value in changed.items())
    return Setting(DEFAULTS, said or None, Origin.SET)


def changing(written: Mapping[str, Any]) -> dict[str, Any]:
    """Those that change the distribution; null is as if it were not there."""
    return {
        name: written[name] for name, neutral in NEUTRAL.items() if written.get(name) not in (None, *neutral)
    }


def _is_overridden(overridden: Mapping[str, Any]) -> bool:
    return not overridden.keys().isdisjoint((*_PARTS, _TEXT))


def _json_file(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none to be read."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last of one that is nested too deeply
        return None
    return written if isinstance(written, dict) else None
