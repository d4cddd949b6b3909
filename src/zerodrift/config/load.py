"""From a file and `--set` overrides to one resolved configuration, and back to text.

Layers go on top of each other: defaults, the file, then each override in order. Nothing is ignored: a key that
means nothing, a value of the wrong type or out of range is refused with the place it came from.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from zerodrift.config.document import parse, render
from zerodrift.config.keys import check_keys, fields
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError, InvalidValue

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


class _Layer(NamedTuple):
    source: str
    values: dict[str, Any]


def load(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in `path` (None: all defaults) under overrides such as `engine.block_size=32`."""
    layers = [] if path is None else [_read(path)]
    layers += [_override(text) for text in overrides]
    values: dict[str, Any] = {}
    for layer in layers:
        check_keys(layer.values, RunConfig, layer.source)
        _merge(values, layer.values)
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
    values = parse(value_text, source)
    for key in reversed(keys):
        values = {key: values}
    assert isinstance(values, dict), "an override has at least one key"
    return _Layer(source, values)


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
    value: Any = values
    for key in keys:
        value = value[key]
    field = next(field for field in fields(RunConfig) if field.path == ".".join(keys))
    return f"{source}: {field.path} is {value!r}, but it must be {_describe(field.kind)}"


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
    return " or ".join(kind)  # an enumeration
