"""The one command that starts vLLM: its words, where each is written, and the variables before it. More is refused."""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.secrets import HIDDEN, hidden, safe

MODULE = "vllm.entrypoints.openai.api_server"
_PIECE = re.compile(
    r"""(?:[ \t\r]|\\\n)+|\#[^\n]*|(?:\d*|&)>>?&?[ ]*[^\s'"|&;<>()]+|&\s*$
    |(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\[^\n]|[^\s'"\\|&;<>()`])+)|(?P<more>.)""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_LAUNCHER = re.compile(r"(?:.*/)?(?:env|exec|nohup|time|uv|run|python[\d.]*)")
"""May stand before it and changes no variable that is not written there."""

_PROMPTS = ("$", "%", "#", ">", "❯")
_CONTAINERS = ("docker", "podman", "nerdctl", "apptainer", "singularity", "kubectl", "enroot")
_MEANING = {
    "|": "its output is piped,",
    "&": "another command follows,",
    ";": "another command follows,",
    "<": "its input is redirected,",
    ">": "its output is redirected,",
    "(": "the shell runs a group,",
    ")": "the shell runs a group,",
    "`": "the shell runs a command inside it,",
}
_FOLLOWED = re.compile(r"[|&;]+\s*(?:tee|grep|tail|sleep|cat|vllm|python3?|bash|echo|wait|disown)\b")


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
    if not found:
        raise _refusal("there is no word in it")
    if found[0][0] in _PROMPTS:
        raise _refusal(f"it begins with {found[0][0]!r}, the prompt of a shell; leave that out")
    for more in (piece for piece in pieces if piece["more"]):
        # Lines before and behind it may be empty, or comments.
        if more[0] != "\n" or found[0].start() < more.start() < found[-1].start():
            raise _refusal(_offence(text, more.start()))
    words = [Word(shlex.split(piece[0])[0], *piece.span()) for piece in found]
    texts = [word.text for word in words]
    program = next((i for i, pair in enumerate(pairwise(texts)) if _starts_vllm(*pair)), None)
    before = texts[:program]
    for place, each in enumerate(before):
        if not _ASSIGNMENT.fullmatch(each) and not _LAUNCHER.fullmatch(each):
            # A word behind a secret may be the rest of it.
            shown = [HIDDEN] if any(hidden(before)) else before[place:]
            raise _refusal(_stranger(shown))
    if program is None:
        raise _refusal("it has no `vllm serve`")
    places = {match[1]: i for i, each in enumerate(before) if (match := _ASSIGNMENT.fullmatch(each))}
    return Launch(words, program + 2, places)


def _offence(text: str, place: int) -> str:
    """The character that ends a single command, in words; what follows is shown only where it can be no secret."""
    char = text[place]
    if char in "'\"":
        return f"the quote {char} at character {place + 1} is not closed"
    if char == "\n":
        return "it goes on in another line; end each line but the last in a backslash"
    followed = _FOLLOWED.match(text, place)
    shown = followed[0] if followed else char
    return f"{_MEANING.get(char, 'the shell reads')} {shown!r} at character {place + 1}; leave that out"


def _stranger(words: Sequence[str]) -> str:
    """A first word that is none of ours, with the one behind it where it says nothing alone."""
    name = words[0].rpartition("/")[2]
    if name in _CONTAINERS:
        return f"{name!r} starts a container; paste what runs inside it"
    if name == "vllm":
        return "`vllm` is not followed by `serve`"
    if any(word.startswith("sglang") for word in words):
        return "it starts SGLang, whose settings are not judged; ask what it answers: zerodrift audit MODEL --engine sglang --url …"
    return f"{safe(' '.join(words[:2]))!r} starts something else than vLLM"


def _starts_vllm(word: str, following: str) -> bool:
    return (word.rpartition("/")[2] == "vllm" and following == "serve") or (word, following) == ("-m", MODULE)


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"this is no single vLLM command: {why}. Paste the command itself, VAR=value … vllm serve MODEL … (or -m {MODULE} …), "
        "each line but the last ending in a backslash"
    )
