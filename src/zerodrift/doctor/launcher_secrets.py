"""Secrets in words before vLLM: `srun --export=ALL,HF_TOKEN=…`, `kubectl exec --token …`.

What launches vLLM is not known here, so a name is believed wherever it stands, and a value goes on as far as it may.
"""

import re
import shlex
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from zerodrift.doctor import json_secrets
from zerodrift.doctor.secret_arguments import is_reference
from zerodrift.doctor.secrets import names_a_secret
from zerodrift.doctor.shell_words import EXPANSION, Word

_NAMED = re.compile(r"(-*)([A-Za-z_][\w.-]*)=")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_NO_VALUE = re.compile(r"--.*|-\w?", re.DOTALL)
"""A key may begin with a dash; with two, or a dash and a letter, it is the next option."""
_REFERENCE = re.compile(r"\$(?:\w+|\{\w+\})")
_PUT_IN = "\0"


class _Piece(NamedTuple):
    """One character as it is written, or one variable of the shell, and the quote that it stands in."""

    raw: str
    quote: str

    @property
    def letter(self) -> str:
        """What is to be read of it."""
        return self.raw if len(self.raw) == 1 else _PUT_IN


def behind_names(raw: str) -> str:
    """One word as written, with every NAME=VALUE whose name says that it is secret by the variable NAME."""
    pieces = _pieces(raw)
    shown: list[_Piece] = []
    done = 0
    for match in _NAMED.finditer("".join(piece.letter for piece in pieces)):
        start = match.end()
        end = _end(pieces, start)
        referred = end == start + 1 and _REFERENCE.fullmatch(pieces[start].raw)
        if match.start() < done or not names_a_secret(match[2]) or referred:
            continue
        name = _variable(match[2]) if match[1] else re.sub(r"\W", "_", match[2])
        quote = pieces[start - 1].quote.replace("'", "")
        shown += [*pieces[done:start], _Piece(f"${name}", quote)]
        done = end
    return _written([*shown, *pieces[done:]]) if done else raw


def in_json(word: Word) -> str | None:
    """A word that is a JSON, without its secrets; None where there is nothing to take out."""
    found = json_secrets.inside(word.text)
    if all(is_reference(each, word) for each in found):
        return None
    return shlex.quote(json_secrets.masked(word.text))


def behind_options(words: Sequence[Word]) -> dict[tuple[int, int], str]:
    """Words behind an option that takes a secret, each by a variable."""
    edits: dict[tuple[int, int], str] = {}
    for option, word in pairwise(words):
        match = _OPTION.fullmatch(option.text)
        if match is None or not names_a_secret(match[1]) or _NO_VALUE.fullmatch(word.text):
            continue
        if not is_reference(word.text, word):
            edits[word.start, word.end] = f'"${_variable(match[1])}"'
    return edits


def _variable(option: str) -> str:
    return re.sub(r"\W", "_", option).upper()


def _pieces(raw: str) -> list[_Piece]:
    found: list[_Piece] = []
    quote = ""
    position = 0
    while position < len(raw):
        character = raw[position]
        if character == quote or (not quote and character in "'\""):
            quote = "" if quote else character
            position += 1
            continue
        if quote != "'" and (match := EXPANSION.match(raw, position)):
            character = match[0]
        elif quote != "'" and character == "\\":
            character = raw[position : position + 2]
        found.append(_Piece(character, quote))
        position += len(character)
    return found


def _end(pieces: Sequence[_Piece], start: int) -> int:
    """Where the value ends: at a comma that no quote of its own holds, else with the word."""
    around, inner = pieces[start - 1].quote, ""
    for index in range(start, len(pieces)):
        letter = pieces[index].letter
        if letter in "'\"":  # quotes for the launcher, between others for the shell
            inner = "" if letter == inner else inner or letter
        elif letter == "," and pieces[index].quote == around and not inner:
            return index
    return len(pieces)


def _written(pieces: Sequence[_Piece]) -> str:
    return "".join(
        f"{quote}{''.join(piece.raw for piece in group)}{quote}"
        for quote, group in groupby(pieces, key=lambda piece: piece.quote)
    )
