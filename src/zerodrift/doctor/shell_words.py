"""A script as a shell would take it apart, with the place of every word, so that it can be changed in place."""

import re
from typing import NamedTuple

from zerodrift.core.errors import ConfigError

_OPERATORS = "|&;<>()`"
# `$NAME`, `${NAME:-x}`, `$(command)`, `$1`, `$@`, and the old form of a command.
EXPANSION = re.compile(r"\$(?:\w+|\{[^}]*\}|\([^)]*\)|[@*#?!$-])|`[^`]*`")


class Word(NamedTuple):
    """One word: what the program sees, and where it stands in the text."""

    text: str
    start: int
    end: int
    expands: tuple[str, ...] = ()
    """What the shell would put something else for, as in `$NAME`; nobody here knows what."""


def split(text: str) -> list[Word]:
    """The words of one simple command; a line break that no backslash stands before ends it, as in a shell."""
    found = commands(text)
    return found[0] if found else []


def commands(text: str) -> list[list[Word]]:
    """Simple commands, one a line. Pipes, redirections and the like are refused: what they do is not read here."""
    found: list[list[Word]] = [[]]
    position = 0
    while position < len(text):
        if text[position] == "\n":
            found.append([])
            position += 1
        elif text.startswith("\\\n", position):  # a line that goes on
            position += 2
        elif (
            text[position].isspace() or text[position:] == "\\"
        ):  # with nothing behind it, it goes on to nowhere
            position += 1
        elif text[position] == "#":
            position = _end_of_line(text, position)
        else:
            found[-1].append(_word(text, position))
            position = found[-1][-1].end
    return [command for command in found if command]


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _word(text: str, start: int) -> Word:
    parts: list[str] = []
    expands: list[str] = []
    position = start
    while position < len(text) and not text[position].isspace() and not text.startswith("\\\n", position):
        character = text[position]
        if character in _OPERATORS or text.startswith("$(", position):
            raise ConfigError(
                f"the command holds {character!r}, which the shell acts upon; give the vLLM command alone"
            )
        if character in "'\"":
            piece, position = _quoted(text, position, expands)
            parts.append(piece)
        elif character == "\\":
            parts.append(text[position + 1 : position + 2])
            position += 2
        elif match := EXPANSION.match(text, position):
            expands.append(match[0])
            parts.append(match[0])
            position = match.end()
        else:
            parts.append(character)
            position += 1
    return Word("".join(parts), start, min(position, len(text)), tuple(expands))


def _quoted(text: str, start: int, expands: list[str]) -> tuple[str, int]:
    """The text between quotes, and where it goes on behind them."""
    quote = text[start]
    parts: list[str] = []
    position = start + 1
    while position < len(text):
        character = text[position]
        if character == quote:
            return "".join(parts), position + 1
        # Between double quotes a backslash escapes these alone, and a dollar still means a variable.
        if quote == '"' and character == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$", "`"):
            position += 1
            character = text[position]
        elif quote == '"' and (match := EXPANSION.match(text, position)):
            expands.append(match[0])
            character = match[0]
        parts.append(character)
        position += len(character)
    raise ConfigError(f"a quote ({quote}) is opened and never closed in the command; close it")
