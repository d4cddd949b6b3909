"""The one command that starts vLLM: its words, where each is written, and the variables before it. More is refused."""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from zerodrift.core.errors import ConfigError

MODULE = "vllm.entrypoints.openai.api_server"
_PIECE = re.compile(
    r"""(?:[ \t\r]|\\\n)+|\#[^\n]*|(?:\d*|&)>>?&?[ ]*[^\s'"|&;<>()]+|&\s*$
    |(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\[^\n]|[^\s'"\\|&;<>()`])+)|(?P<more>.)""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_LAUNCHER = re.compile(r"(?:.*/)?(?:env|exec|nohup|time|uv|run|python[\d.]*)")
"""May stand before it and changes no variable that is not written there."""


class Word(NamedTuple):
    """One word as vLLM sees it, and where it is written."""

    text: str
    start: int
    end: int


class Launch(NamedTuple):
    """The command that starts vLLM."""

    words: Sequence[Word]
    behind: int
    """Index of the first word behind the program."""
    places: Mapping[str, int]
    """Variables before it, by the indices of the words that set them."""

    @property
    def env(self) -> dict[str, str]:
        """Their values, as they are written."""
        return {name: self.words[place].text.partition("=")[2] for name, place in self.places.items()}


def find(text: str) -> Launch:
    """The vLLM command that a text is."""
    pieces = list(_PIECE.finditer(text))
    found = [piece for piece in pieces if piece["word"]]
    more = [piece for piece in pieces if piece["more"]]
    # Lines before and behind it may be empty, or comments.
    if not found or any(m[0] != "\n" or found[0].start() < m.start() < found[-1].start() for m in more):
        raise _refusal()
    words = [Word(shlex.split(piece[0])[0], *piece.span()) for piece in found]
    texts = [word.text for word in words]
    program = next((i for i, pair in enumerate(pairwise(texts)) if _starts_vllm(*pair)), None)
    before = texts[:program]
    if program is None or not all(
        _ASSIGNMENT.fullmatch(each) or _LAUNCHER.fullmatch(each) for each in before
    ):
        raise _refusal()
    places = {match[1]: i for i, each in enumerate(before) if (match := _ASSIGNMENT.fullmatch(each))}
    return Launch(words, program + 2, places)


def _starts_vllm(word: str, following: str) -> bool:
    return (word.rpartition("/")[2] == "vllm" and following == "serve") or (word, following) == ("-m", MODULE)


def _refusal() -> ConfigError:
    return ConfigError(
        f"this is no single vLLM command; paste the command itself, VAR=value … vllm serve MODEL … (or -m {MODULE} …), each "
        "line but the last ending in a backslash; of a script or a container, what it runs"
    )
