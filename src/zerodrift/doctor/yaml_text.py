"""A YAML file: what its program reads in it, and the same with other values, comments and order kept (ruamel.yaml).

Values are read as PyYAML reads them, as vLLM and the trainers do: to YAML 1.2, which ruamel.yaml speaks, `no` is text.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent

from zerodrift.backends.json_path import look_up
from zerodrift.config.document import parse
from zerodrift.core.errors import ConfigError
from zerodrift.doctor import secrets
from zerodrift.doctor.setting import Value

Changes = Mapping[tuple[str, ...], Value]
"""New values by their path of keys; None takes the key out."""


class YamlText:
    """A mapping at the top."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        values = parse(text, source)  # refuses what is no YAML, and keys given twice
        if not isinstance(values, dict):
            raise ConfigError(f"{source} holds no mapping of settings; is it a configuration?")
        self.values: dict[Any, Any] = values

    def get(self, path: Sequence[str]) -> Any:
        """What stands at the end of the path; UNSET where there is no such path."""
        return look_up(self.values, "/".join(path))

    def with_values(self, changes: Changes, renamed: Mapping[str, str]) -> "YamlText | None":
        """The same with other values and other keys at the top; None where that would change something else too."""
        if not self.values.keys().isdisjoint(renamed.values()):
            return None
        expected = {renamed.get(key, key): value for key, value in self.values.items()}
        try:
            tree, dump = _round_trip(self.text)
            for old, new in renamed.items():
                _rename(tree, old, new)
            for path, value in changes.items():
                if value is not None or self.get(path) is not UNSET:
                    _put(tree, path, value)
                    expected = _changed(expected, path, value)
            changed = YamlText(dump(tree), self.source)
        except (ConfigError, YAMLError, TypeError, AttributeError, RecursionError):
            return None
        # An anchor would carry a change elsewhere, and a merged key stands elsewhere.
        return changed if changed.values == expected else None

    def printed(self) -> str:
        """The text without secrets."""
        try:
            tree, dump = _round_trip(self.text)
            before = dump(tree)
            secrets.hide(tree)
            text = self.text if dump(tree) == before else dump(tree)
        except (YAMLError, RecursionError) as error:
            raise ConfigError(
                f"{self.source}: cannot be printed without its secrets; change it by hand"
            ) from error
        return secrets.hide_comments(text)


def read_text(path: Path) -> str:
    """The text of a file that a user named."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(
            f"{path} cannot be read as text ({reason}); a configuration is a UTF-8 file"
        ) from error


def _round_trip(text: str) -> tuple[Any, Any]:
    """The tree with its comments, and what writes it as it was indented."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10**6
    _, indent, offset = load_yaml_guess_indent(text)
    yaml.indent(
        mapping=indent if indent and not offset else 2, sequence=(offset or 0) + 2, offset=offset or 0
    )

    def dump(tree: Any) -> str:
        out = io.StringIO()
        yaml.dump(tree, out)
        return out.getvalue()

    return yaml.load(text), dump


def _put(tree: Any, path: Sequence[str], value: Value) -> None:
    *above, last = path
    for key in above:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
    if value is not None:
        tree[last] = value
    elif last in tree:
        if last in tree.ca.items:
            raise TypeError("a comment behind it would go as well")
        del tree[last]


def _rename(tree: Any, old: str, new: str) -> None:
    """In the same place, with the comment behind it."""
    place, comment = list(tree).index(old), tree.ca.items.pop(old, None)
    tree.insert(place, new, tree.pop(old))
    if comment is not None:
        tree.ca.items[new] = comment


def _changed(tree: Mapping[Any, Any], path: Sequence[str], value: Value) -> dict[Any, Any]:
    """The same on plain values, where an anchor is as many values as it is used."""
    first, *rest = path
    if rest:
        return {**tree, first: _changed(tree.get(first) or {}, rest, value)}
    return {key: each for key, each in {**tree, first: value}.items() if key != first or value is not None}
