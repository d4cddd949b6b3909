"""What a vLLM server fills into requests that leave sampling out: from a generation_config.json, and from overrides."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerodrift.doctor import checkpoint
from zerodrift.doctor.setting import Origin, Setting, Value, unknown

NAME = "generation_defaults"
FLAGS = frozenset({"generation-config", "hf-config-path", "override-generation-config"})
"""That decide about it."""
FILE = "generation_config.json"
LEGACY = ("min_p",)
"""What vLLM takes from a config.json where there is no generation_config.json. Older transformers took temperature,
top_p, top_k and repetition_penalty from there as well; the 5.16 and later that vLLM 0.32 asks for drop them."""
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


def from_files(source: Value, model: str | None, overridden: Mapping[str, Any]) -> Setting:
    """What the file in force would change; `source` is what --generation-config says, or would say.

    `auto` is the model's own, `vllm` none, and anything else a directory or a name on the hub. Only a directory that
    is here can be looked into. A key that is overridden, be it with null, is not taken from there.
    """
    if source == "vllm":
        return Setting(NAME, None, Origin.SET)
    place = model if source == "auto" else source
    if not isinstance(place, str) or not (directory := Path(place)).is_dir():
        return unknown(NAME)
    written = _written(directory)
    if written is None:
        return unknown(NAME)
    changed = changing({name: value for name, value in written.items() if name not in overridden})
    return Setting(NAME, ", ".join(f"{name} {value}" for name, value in changed.items()) or None, Origin.SET)


def _written(directory: Path) -> dict[str, Any] | None:
    """What the directory says of sampling; None where that cannot be read."""
    if (directory / FILE).exists():
        return checkpoint.json_file(directory, FILE)
    config = checkpoint.json_file(directory, checkpoint.CONFIG)
    if config is None:
        return None
    text = config.get("text_config")
    levels = (text if isinstance(text, dict) else {}, config)
    return {name: level[name] for level in levels for name in LEGACY if level.get(name) is not None}


def changing(written: Mapping[str, Any]) -> dict[str, Any]:
    """Those that change the distribution; null is as if it were not there."""
    return {
        name: written[name] for name, neutral in NEUTRAL.items() if written.get(name) not in (None, *neutral)
    }
