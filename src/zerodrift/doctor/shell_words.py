"""A command as a shell would take it apart, with the place of every word, so that it can be changed in place."""

from typing import NamedTuple

from zerodrift.core.errors import ConfigError

_OPERATORS = "|&;<>()`"


class Word(NamedTuple):
    """One word: what the program sees, and where it stands in the text."""

    text: str
    start: int
    end: int


def split(text: str) -> list[Word]:
    """The words of one simple command. Pipes, redirections and the like are refused: they are other commands."""
    words: list[Word] = []
    position = 0
    while True:
        position = _skip_blanks(text, position)
        if position == len(text):
            return words
        word = _word(text, position)
        words.append(word)
        position = word.end


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text):
        if text.startswith("\\\n", position):  # a line that goes on
            position += 2
        elif text[position].isspace():
            position += 1
        else:
            break
    return position


def _word(text: str, start: int) -> Word:
    parts: list[str] = []
    position = start
    while position < len(text) and not text[position].isspace() and not text.startswith("\\\n", position):
        character = text[position]
        if character in _OPERATORS:
            raise ConfigError(
                f"the command holds {character!r}, which the shell acts upon; give the vLLM command alone"
            )
        if character in "'\"":
            piece, position = _quoted(text, position)
            parts.append(piece)
        elif character == "\\":
            parts.append(text[position + 1 : position + 2])
            position += 2
        else:
            parts.append(character)
            position += 1
    return Word("".join(parts), start, min(position, len(text)))


def _quoted(text: str, start: int) -> tuple[str, int]:
    """The text between quotes, and where it goes on behind them."""
    quote = text[start]
    parts: list[str] = []
    position = start + 1
    while position < len(text):
        character = text[position]
        if character == quote:
            return "".join(parts), position + 1
        # Between double quotes a backslash escapes these alone.
        if quote == '"' and character == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$", "`"):
            position += 1
            character = text[position]
        parts.append(character)
        position += 1
    raise ConfigError(f"a quote ({quote}) is opened and never closed in the command; close it")
