"""A YAML file changed in place: comments, order and style stay, one value or one line is other than before."""

from collections.abc import Sequence
from typing import Any

import yaml

from zerodrift.config.document import parse, render
from zerodrift.core.errors import ConfigError
from zerodrift.doctor.secrets import HIDDEN, names_a_secret
from zerodrift.doctor.setting import Value

NOTHING = ("", "null", "~")
"""Spellings of none."""


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
            return self._with(node.start_mark.index, node.end_mark.index, _scalar(value))
        return self._inserted(path, len(nodes), value)

    def without(self, path: Sequence[str]) -> "YamlText":
        """The line, or lines, of `path` taken out; what is not there is no loss."""
        nodes = self._nodes(path)
        if len(nodes) < len(path):
            return self
        key, node = nodes[-1]
        start = self.text.rfind("\n", 0, key.start_mark.index) + 1
        return self._with(start, self._line_end(node), "")

    def renamed(self, path: Sequence[str], name: str) -> "YamlText":
        """The last key of `path` under another name."""
        key, _ = self._nodes(path)[-1]
        return self._with(key.start_mark.index, key.end_mark.index, name)

    def without_secrets(self) -> str:
        """The text, with values of keys that name a secret taken out."""
        text = self.text
        for node in reversed(_secrets(self._root())):
            text = text[: node.start_mark.index] + f'"{HIDDEN}"' + text[node.end_mark.index :]
        return text

    def _with(self, start: int, end: int, replacement: str) -> "YamlText":
        return YamlText(self.text[:start] + replacement + self.text[end:], self.source)

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

    def _inserted(self, path: Sequence[str], depth: int, value: Value) -> "YamlText":
        """`path` written below its parent of this depth, in the style of that."""
        names = path[depth:]
        if depth == 0:
            return self._as_lines(self._root(), 0, names, value)
        key, parent = self._nodes(path[:depth])[-1]
        if isinstance(parent, yaml.MappingNode) and parent.flow_style:
            where = parent.end_mark.index - 1
            return self._with(where, where, (", " if parent.value else "") + _flow(names, value))
        if isinstance(parent, yaml.MappingNode):
            return self._as_lines(parent, 0, names, value)
        if parent.value not in NOTHING:
            raise ConfigError(f"{self.source}: {key.value} is no section; write {'.'.join(path)} by hand")
        if parent.start_mark.index < parent.end_mark.index:  # `null` is written out
            return self._with(parent.start_mark.index, parent.end_mark.index, f"{{{_flow(names, value)}}}")
        return self._as_lines(parent, key.start_mark.column + 2, names, value)

    def _as_lines(self, parent: yaml.Node, column: int, names: Sequence[str], value: Value) -> "YamlText":
        """Behind the last line of `parent`, as far in as its keys are; `column` where it has none."""
        if isinstance(parent, yaml.MappingNode) and parent.value:
            column = parent.value[0][0].start_mark.column
        where = self._line_end(parent)
        lines = [f"{' ' * (column + 2 * step)}{name}:" for step, name in enumerate(names)]
        lines[-1] += f" {_scalar(value)}"
        start = "" if not where or self.text[where - 1] == "\n" else "\n"
        return self._with(where, where, start + "".join(f"{line}\n" for line in lines))

    def _line_end(self, node: yaml.Node) -> int:
        """Behind the last line that belongs to `node`."""
        while isinstance(node, yaml.MappingNode | yaml.SequenceNode) and node.value and not node.flow_style:
            last = node.value[-1]
            node = last[1] if isinstance(last, tuple) else last
        end = node.end_mark.index
        if end and self.text[end - 1] == "\n":
            return end
        newline = self.text.find("\n", end)
        return len(self.text) if newline < 0 else newline + 1


def _flow(names: Sequence[str], value: Value) -> str:
    entry = f"{names[-1]}: {_scalar(value)}"
    for name in reversed(names[:-1]):
        entry = f"{name}: {{{entry}}}"
    return entry


def _scalar(value: Value) -> str:
    return render([value])[2:].rstrip("\n")


def _secrets(node: yaml.Node) -> list[yaml.Node]:
    found: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if (
                isinstance(value, yaml.ScalarNode)
                and isinstance(key.value, str)
                and names_a_secret(key.value)
            ):
                found += [] if value.value in NOTHING else [value]
            else:
                found += _secrets(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            found += _secrets(value)
    return found
