"""From a file and `--set` overrides to one resolved configuration, and back to text.

Layers go on top of each other: defaults, the file, then each override in order. Nothing is ignored: a key that
means nothing, a value of the wrong type or out of range is refused with the place it came from.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from zerodrift.config.document import parse, render
from zerodrift.config.keys import Field, check_keys, fields
from zerodrift.config.run import EXACT, RunConfig
from zerodrift.core.errors import ConfigError, InvalidValue

_PLACE = re.compile(r" - at (`key` in )?`\$\.?(?P<path>[^`]*)`$")


class _Layer(NamedTuple):
    source: str
    values: dict[str, Any]


class Option(NamedTuple):
    """A setting that a command has an option of its own for: not parsed, and cited under its own name."""

    flag: str
    path: str
    value: str | float | Path | Sequence[str]


def load(path: Path | None, overrides: Sequence[str] = (), options: Sequence[Option] = ()) -> RunConfig:
    """The configuration in `path` (None: all defaults) under overrides such as `engine.block_size=32`."""
    layers = [] if path is None else [_read(path)]
    layers += [_override(text) for text in overrides]
    for flag, key, value in options:
        plain = str(value) if isinstance(value, Path) else value
        layers.append(_Layer(flag, _nested(key.split("."), plain)))
    values: dict[str, Any] = {}
    for layer in layers:
        check_keys(layer.values, RunConfig, layer.source)
        _merge(values, layer.values)
    engine = values.get("engine")
    if isinstance(engine, dict) and engine.get("name", EXACT.name) == EXACT.name:
        engine.setdefault("enable_prefix_caching", EXACT.enable_prefix_caching)
    try:
        return msgspec.convert(values, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, values, layers)) from error


def dump(config: RunConfig) -> str:
    """YAML that loads back to an equal configuration, with every default written out."""
    return render(msgspec.to_builtins(config))


def _read(path: Path) -> _Layer:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration at {path}; write one with `zerodrift init`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as text ({error}); a configuration is a UTF-8 YAML file"
        ) from error
    values = parse(text, str(path))
    if not isinstance(values, dict):
        what = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(
            f"{path} holds {what}; a configuration is a mapping of sections such as model: and engine:"
        )
    return _Layer(str(path), values)


def _override(text: str) -> _Layer:
    source = f"--set {text}"
    dotted, separator, value_text = text.partition("=")
    keys = dotted.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(
            f"{source} is not of the form section.key=value; for example --set engine.block_size=32"
        )
    if not value_text.strip():
        # An unset shell variable looks just like this.
        raise ConfigError(
            f"{source} gives no value; write {dotted}=null for none, or {dotted}='\"\"' for empty text"
        )
    return _Layer(source, _nested(keys, parse(value_text, source)))


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    assert isinstance(value, dict), "there is at least one key"
    return value


def _merge(base: dict[str, Any], upper: dict[str, Any]) -> None:
    for key, value in upper.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _explain(error: msgspec.ValidationError, values: dict[str, Any], layers: Sequence[_Layer]) -> str:
    """Where the refused value came from, what it is, and what was expected there."""
    place = _PLACE.search(str(error))
    path = place["path"] if place else ""
    keys = [key for key in re.split(r"\.|\[.*", path) if key]
    source = next((layer.source for layer in reversed(layers) if _holds(layer.values, keys)), "defaults")
    if isinstance(error.__cause__, InvalidValue):
        return f"{source}: {path + ': ' if path else ''}{error.__cause__}"
    field = _field_at(keys)
    value: Any = values
    for key in field.path.split("."):
        value = value[key]
    return f"{source}: {field.path} is {value!r}, but it must be {_describe(field.kind)}"


def _field_at(keys: Sequence[str]) -> Field:
    """The innermost field on the way: the last keys may be a user's own, in a mapping."""
    known = {field.path: field for field in fields(RunConfig)}
    return next(known[path] for end in range(len(keys), 0, -1) if (path := ".".join(keys[:end])) in known)


def _holds(values: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _describe(kind: Any) -> str:
    """A field's type in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if kind in words:
        return words[kind]
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each entry being {_describe(get_args(kind)[0])}"
    if isinstance(kind, UnionType):
        return " or ".join(_describe(part) for part in get_args(kind))
    if get_origin(kind) in (Mapping, dict):
        return "a mapping of text to text; put numbers in quotes, as in {NAME: '4'}"
    assert issubclass(kind, StrEnum), f"no words for {kind}"
    return " or ".join(kind)
