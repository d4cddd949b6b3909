"""Settings of a trainer's YAML file: what is written at a path, else the framework's default."""

from collections.abc import Mapping
from typing import Any

import msgspec

from zerodrift.doctor.setting import Origin, Setting, Value, unknown
from zerodrift.doctor.tables import UNWRITTEN, FileName
from zerodrift.doctor.vllm_arguments import number
from zerodrift.doctor.yaml_text import YamlText


def settings(text: YamlText, names: Mapping[str, FileName]) -> dict[str, Setting]:
    """One setting per name, in that order."""
    found: dict[str, Setting] = {}
    for name, spec in names.items():
        there, value = text.get(spec.path.split("."))
        found[name] = _written(name, value, names, found) if there else _default(name, spec, found)
    return found


def value_in_file(spec: FileName, value: Value) -> Value:
    """`value` in the file's own words."""
    for word, meaning in spec.values.items():
        if meaning == value:
            return {"true": True, "false": False}.get(word, word)
    return value


def changed(text: YamlText, names: Mapping[str, FileName], changes: Mapping[str, Value]) -> YamlText:
    """The file with those of `changes` that it has a place for."""
    for name, value in changes.items():
        if name in names:
            path = names[name].path.split(".")
            written = value_in_file(names[name], value)
            text = text.without(path) if written is None else text.with_value(path, written)
    return text


def plain(value: Any) -> Value:
    """A YAML value as a setting: structures are named by their keys."""
    if isinstance(value, dict):
        return ", ".join(map(str, value)) or None
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _written(name: str, value: Any, names: Mapping[str, FileName], found: Mapping[str, Setting]) -> Setting:
    spec = names[name]
    if isinstance(value, str) and "${" in value:
        return _interpolated(name, value, names, found)
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


def _interpolated(
    name: str, value: str, names: Mapping[str, FileName], found: Mapping[str, Setting]
) -> Setting:
    """`${..llm.parameters.temperature}` is that setting, as far as it is known; any other cannot be followed from here."""
    target = value.removeprefix("${").removesuffix("}").lstrip(".")
    for other, spec in names.items():
        if other in found and (spec.path == target or spec.path.endswith(f".{target}")):
            return msgspec.structs.replace(found[other], name=name)
    return unknown(name)


def _default(name: str, spec: FileName, found: Mapping[str, Setting]) -> Setting:
    if spec.default == UNWRITTEN:
        return unknown(name)
    if isinstance(spec.default, str) and spec.default.startswith("$"):
        source = found[spec.default[1:]]
        return Setting(name, source.value, Origin.DEFAULT if source.known else Origin.UNKNOWN)
    return Setting(name, spec.default, Origin.DEFAULT)
