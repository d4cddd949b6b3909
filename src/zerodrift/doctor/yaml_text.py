"""A YAML file changed in place: comments, order and style stay, one value or one entry is other than before.

Each change is read back and compared with what it should be: an anchor, a merge or a style that is not followed here
would otherwise change a setting that nobody asked about.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from zerodrift.config.document import parse, render
from zerodrift.core.errors import ConfigError
from zerodrift.doctor import json_secrets
from zerodrift.doctor.secrets import HIDDEN, VLLM_SECRETS, names_a_secret
from zerodrift.doctor.setting import Value
from zerodrift.doctor.yaml_entry import (
    Edit,
    applied,
    in_place_of,
    line_end,
    with_entry,
    without_entry,
    without_lines,
)

NOTHING = ("", "null", "~")
"""Spellings of none."""
_ABSENT = object()
_WHOLE = f'"{HIDDEN}"'


class YamlText:
    """A mapping at the top, addressed by paths of keys."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        values = parse(text, source)  # refuses what is no YAML, and keys given twice
        if not isinstance(values, dict):
            raise ConfigError(f"{source} holds no mapping of settings; is it a configuration?")
        self.values: dict[Any, Any] = values

    def get(self, path: Sequence[str]) -> tuple[bool, Any]:
        """Whether the path is there, and what stands at its end."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, dict) or key not in value:
                return False, None
            value = value[key]
        return True, value

    def with_value(self, path: Sequence[str], value: Value) -> "YamlText":
        """The value at `path` replaced, or written below its nearest parent that is there."""
        nodes = self._nodes(path)
        if len(nodes) == len(path):
            _, node = nodes[-1]
            edit = Edit(node.start_mark.index, node.end_mark.index, _scalar(value))
        else:
            edit = self._inserted(path, len(nodes), value)
        return self._with([edit], path, _put(self.values, path, value))

    def without(self, path: Sequence[str]) -> "YamlText":
        """Its lines, or between braces the entry alone, taken out; what is not there is no loss."""
        if not self.get(path)[0]:
            return self
        nodes = self._nodes(path)
        if len(nodes) < len(path):
            raise self._by_hand(path, "comes from a merged section")
        above, parent = nodes[-2] if len(nodes) > 1 else (None, self._root())
        assert isinstance(parent, yaml.MappingNode), "something was found in it"
        if parent.flow_style:
            edits = without_entry(self.text, parent, nodes[-1][0])
        else:
            edits = without_lines(self.text, above, nodes[-1], only=len(parent.value) == 1)
        return self._with(edits, path, _put(self.values, path, _ABSENT))

    def renamed(self, path: Sequence[str], name: str) -> "YamlText":
        """The last key of `path` under another name."""
        key, _ = self._nodes(path)[-1]
        edit = Edit(key.start_mark.index, key.end_mark.index, name)
        new = [*path[:-1], name]
        rest = _put(self.values, path, _ABSENT)
        return self._with([edit], new, _put(rest, new, self.get(path)[1]))

    def without_secrets(self) -> str:
        """The text, with values of keys that name a secret taken out."""
        # An anchor is one node wherever it is used.
        found = _secrets(self._root())
        return applied(self.text, [in_place_of(self.text, node, shown) for node, shown in found.items()])

    def _with(self, edits: list[Edit], path: Sequence[str], expected: Mapping[Any, Any]) -> "YamlText":
        """The text with these edits, made for the sake of `path`, if it then holds what is expected."""
        try:
            changed = YamlText(applied(self.text, edits), self.source)
        except ConfigError as error:
            raise self._by_hand(path, "cannot be changed in this style") from error
        other = next(_differences(expected, changed.values), None)
        if other is not None:
            raise self._by_hand(path, f"cannot be changed without changing {'.'.join(map(str, other))}")
        return changed

    def _by_hand(self, path: Sequence[str], reason: str) -> ConfigError:
        return ConfigError(f"{self.source}: {'.'.join(path)} {reason}; change it by hand")

    def _root(self) -> yaml.MappingNode:
        node = yaml.compose(self.text, Loader=yaml.SafeLoader)
        assert isinstance(node, yaml.MappingNode), "checked when it was read"
        return node

    def _nodes(self, path: Sequence[str]) -> list[tuple[yaml.Node, yaml.Node]]:
        """Key and value of each step, as far as there are any."""
        found: list[tuple[yaml.Node, yaml.Node]] = []
        node: yaml.Node = self._root()
        for name in path:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            pair = next(((key, value) for key, value in pairs if key.value == name), None)
            if pair is None:
                break
            found.append(pair)
            node = pair[1]
        return found

    def _inserted(self, path: Sequence[str], depth: int, value: Value) -> Edit:
        """`path` written below its parent of this depth, in the style of that."""
        names = path[depth:]
        root = self._root()
        key, parent = self._nodes(path[:depth])[-1] if depth else (root, root)
        if isinstance(parent, yaml.MappingNode) and parent.flow_style:
            return with_entry(self.text, parent, _flow(names, value))
        if isinstance(parent, yaml.MappingNode):
            return self._as_lines(parent, 0, names, value)
        if parent.value not in NOTHING:
            raise ConfigError(f"{self.source}: {key.value} is no section; write {'.'.join(path)} by hand")
        if parent.start_mark.index < parent.end_mark.index:  # `null` is written out
            return Edit(parent.start_mark.index, parent.end_mark.index, f"{{{_flow(names, value)}}}")
        return self._as_lines(parent, key.start_mark.column + 2, names, value)

    def _as_lines(self, parent: yaml.Node, column: int, names: Sequence[str], value: Value) -> Edit:
        """Behind the last line of `parent`, as far in as its keys are; `column` where it has none."""
        if isinstance(parent, yaml.MappingNode) and parent.value:
            column = parent.value[0][0].start_mark.column
        where = line_end(self.text, parent)
        lines = [f"{' ' * (column + 2 * step)}{name}:" for step, name in enumerate(names)]
        lines[-1] += f" {_scalar(value)}"
        start = "" if not where or self.text[where - 1] == "\n" else "\n"
        return Edit(where, where, start + "".join(f"{line}\n" for line in lines))


def _put(values: Mapping[Any, Any], path: Sequence[str], value: object) -> dict[Any, Any]:
    """A copy that holds `value` at `path`, or nothing there where that is absent."""
    name, *below = path
    if below:
        section = values.get(name)
        value = _put(section if isinstance(section, dict) else {}, below, value)
    rest = {key: each for key, each in values.items() if key != name}
    return rest if value is _ABSENT else {**rest, name: value}


def _differences(one: object, other: object, at: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Paths at which two documents differ, whatever the order of their keys."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _differences(one.get(key, _ABSENT), other.get(key, _ABSENT), (*at, key))
    elif repr(one) != repr(other):  # 1 is not true here, and .nan is .nan
        yield at


def _flow(names: Sequence[str], value: Value) -> str:
    entry = f"{names[-1]}: {_scalar(value)}"
    for name in reversed(names[:-1]):
        entry = f"{name}: {{{entry}}}"
    return entry


def _scalar(value: Value) -> str:
    return render([value])[2:].rstrip("\n")


def _secrets(node: yaml.Node, *, below: bool = False) -> dict[yaml.Node, str]:
    """Every value that holds a secret, and what to show for it: vLLM takes a list of keys as well as one."""
    if isinstance(node, yaml.MappingNode):
        inner = [(value, below or _names(key)) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inner = [(value, below) for value in node.value]
    elif below:
        return {} if node.value in NOTHING else {node: _WHOLE}
    else:
        inside = json_secrets.inside(node.value)
        return {node: _single_quoted(json_secrets.masked(node.value))} if inside else {}
    found: dict[yaml.Node, str] = {}
    for value, secret in inner:
        # What an anchor names may be a secret in one place and only hold one in another.
        whole = {each: shown for each, shown in found.items() if shown == _WHOLE}
        found |= _secrets(value, below=secret) | whole
    return found


def _names(key: yaml.Node) -> bool:
    name = key.value if isinstance(key.value, str) else ""
    return names_a_secret(name) or name.replace("_", "-") in VLLM_SECRETS


def _single_quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
