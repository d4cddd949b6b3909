"""Where an entry of a YAML mapping stands in its text, and what has to go with it when it goes."""

import re
from typing import NamedTuple

import yaml

_OPEN = (yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken)
_CLOSE = (yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
_COLON = re.compile(r"\s*:(?:[ \t]+[&!]\S*)*")
"""Behind a key, with the anchor and the tag of its value."""
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
"""Anchor and tag, before a value."""
_REST_OF_LINE = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_BLANKS = re.compile(r"[ \t]*(?!#)")
"""All but the one before a comment, which needs it."""


class Edit(NamedTuple):
    """A stretch of the text, and what stands there afterwards."""

    start: int
    end: int
    replacement: str = ""


class _Separator(NamedTuple):
    """The brace that opens a flow mapping, a comma in it, or the brace that closes it."""

    where: int
    before: int
    """Where the token in front of it ends."""


def applied(text: str, edits: list[Edit]) -> str:
    """All of them, from the end, so that places stay true."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.replacement + text[edit.end :]
    return text


def in_place_of(text: str, node: yaml.Node, shown: str) -> Edit:
    """Another value, under the anchor of this one; a block of lines ends with its line break."""
    start, end = node.start_mark.index, node.end_mark.index
    written = text[start:end]
    properties = _PROPERTIES.match(written)
    anchors = [each for each in properties[0].split() if each.startswith("&")] if properties else []
    breaks = written[len(written.rstrip("\r\n")) :]
    return Edit(start, end, " ".join([*anchors, shown]) + breaks)


def without_lines(
    text: str, above: yaml.Node | None, entry: tuple[yaml.Node, yaml.Node], *, only: bool
) -> list[Edit]:
    """The lines of an entry in block style. `above` is the key of its section, None at the top.

    Without the `only` entry its section would read as null, which is not the same as empty.
    """
    key, value = entry
    start, end = _line_start(text, key.start_mark.index), line_end(text, value)
    if not only:
        return [Edit(start, end)]
    if above is None:
        return [Edit(start, end, "{}\n")]
    colon = _COLON.match(text, above.end_mark.index)
    assert colon is not None, "a key with something below it has one"
    return [Edit(colon.end(), colon.end(), " {}"), Edit(start, end)]


def without_entry(text: str, parent: yaml.MappingNode, key: yaml.Node) -> list[Edit]:
    """An entry between braces, with one comma: the one behind it, else the one before it."""
    separators = _separators(text, parent)
    start = key.start_mark.index
    after = next(index for index, each in enumerate(separators) if each.where > start)
    left, right = separators[after - 1], separators[after]
    if right is not separators[-1]:
        return [_with_its_line(text, start, right.where + 1)]
    if left is separators[0]:
        return [_with_its_line(text, start, right.before)]
    if not text[left.where + 1 : start].strip(" \t"):
        return [Edit(left.where, right.before)]
    return [Edit(left.where, left.where + 1), _with_its_line(text, start, right.before)]


def with_entry(text: str, parent: yaml.MappingNode, entry: str) -> Edit:
    """An entry as the last between braces, behind a comma that may be there already."""
    *others, closing = _separators(text, parent)
    where = closing.before
    if where == others[-1].where + 1:  # behind the opening brace, or a comma
        return Edit(where, where, f" {entry}" if len(others) > 1 else entry)
    return Edit(where, where, f", {entry}")


def line_end(text: str, node: yaml.Node) -> int:
    """Behind the last line that belongs to `node`."""
    while isinstance(node, yaml.MappingNode | yaml.SequenceNode) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    end = node.end_mark.index
    if end and text[end - 1] == "\n":
        return end
    newline = text.find("\n", end)
    return len(text) if newline < 0 else newline + 1


def _separators(text: str, parent: yaml.MappingNode) -> list[_Separator]:
    """Asked of the scanner: commas also stand in strings, comments and what is nested."""
    found: list[_Separator] = []
    depth, before = 0, 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        here = token.start_mark.index
        if here >= parent.start_mark.index:
            depth += isinstance(token, _OPEN)
            if depth == 1 and (not found or isinstance(token, (yaml.FlowEntryToken, *_CLOSE))):
                found.append(_Separator(here, before))
            depth -= isinstance(token, _CLOSE)
            if found and not depth:
                break
        before = token.end_mark.index
    return found


def _with_its_line(text: str, start: int, end: int) -> Edit:
    """The whole line, comment included, where nothing else stands on it; otherwise the blanks behind."""
    line = _line_start(text, start)
    rest = _REST_OF_LINE.match(text, end)
    if rest is not None and not text[line:start].strip(" \t"):
        return Edit(line, rest.end())
    blanks = _BLANKS.match(text, end)
    return Edit(start, end if blanks is None else blanks.end())


def _line_start(text: str, where: int) -> int:
    return text.rfind("\n", 0, where) + 1
