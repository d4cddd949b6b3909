"""A YAML file: what its program reads in it, and the same with other values, comments and order kept (ruamel.yaml).

Values are read as PyYAML reads them, as vLLM and the trainers do: to YAML 1.2, which ruamel.yaml speaks, `no` is text.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import CommentMark, YAMLError
from ruamel.yaml.tokens import CommentToken
from ruamel.yaml.util import load_yaml_guess_indent

from zerodrift.config.document import parse, render
from zerodrift.core.errors import ConfigError
from zerodrift.doctor import listed, secrets
from zerodrift.doctor.setting import Value
from zerodrift.doctor.vllm_flags import flag_names

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

    @classmethod
    def of(cls, path: Path) -> "YamlText":
        """The file at `path`."""
        return cls(read_text(path), str(path))

    def get(self, path: Sequence[str]) -> tuple[bool, Any]:
        """Whether the path is there, and what stands at its end."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return False, None
            value = value[key]
        return True, value

    def with_values(self, changes: Changes, renamed: Mapping[str, str]) -> "YamlText | None":
        """The same with other values and other keys at the top; None where that would change something else too."""
        try:
            expected = parse(render(self.values), self.source)  # an anchor's value as often as it is used
            tree, dump = _round_trip(self.text)
            for each in (tree, expected):
                for old, new in renamed.items():
                    _rename(each, old, new)
                for path, value in changes.items():
                    _put(each, path, value)
            changed = YamlText(dump(tree), self.source)
        except (ConfigError, YAMLError, TypeError, RecursionError):
            return None
        # An anchor would carry a change elsewhere, and a merged key stands elsewhere.
        return changed if render(_sorted(changed.values)) == render(_sorted(expected)) else None

    def printed(self, unlisted: secrets.Unlisted = listed.unlisted_in_a_tree) -> str:
        """The text without secrets."""
        try:
            tree, dump = _round_trip(self.text)
            text = dump(tree) if secrets.hide_below(tree, flag_names(), unlisted) else self.text
        except YAMLError as error:
            raise ConfigError(
                f"{self.source}: cannot be printed without its secrets; change it by hand"
            ) from error
        return secrets.hide_comments(text, listed.names() if unlisted is listed.unlisted_in_flags else None)


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
            if value is None:
                return
            tree[key] = {}
        tree = tree[key]
    if value is not None:
        tree[last] = value
    elif last in tree:
        _keep_comments(tree, last)
        del tree[last]


def _keep_comments(tree: Any, key: str) -> None:
    """Lines behind an entry that goes are about what follows: hand them to the entry before it."""
    comments = tree.ca.items if isinstance(tree, CommentedMap) else {}
    behind = "".join(token.value for token in comments.get(key, ())[2:3] if token).partition("\n")[2]
    keys = list(tree)
    before = keys[keys.index(key) - 1] if keys.index(key) else None
    if behind.strip() and before is not None and not isinstance(tree[before], dict | list):
        kept = comments.setdefault(before, [None] * 4)
        if kept[2] is None:
            kept[2] = CommentToken("\n", CommentMark(0), None)
        kept[2].value += behind


def _rename(tree: Any, old: str, new: str) -> None:
    """In the same place, with the comment behind it."""
    if new in tree:
        raise TypeError(f"{new} is there already")
    place, value = list(tree).index(old), tree[old]
    if isinstance(tree, CommentedMap):
        comment = tree.ca.items.pop(old, None)
        del tree[old]
        tree.insert(place, new, value)
        if comment is not None:
            tree.ca.items[new] = comment
    else:
        tree[new] = tree.pop(old)


def _sorted(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _sorted(values[key]) for key in sorted(values, key=repr)}
    return [_sorted(each) for each in values] if isinstance(values, list) else values
