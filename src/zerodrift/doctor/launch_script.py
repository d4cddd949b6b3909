"""Where in a command or a launch script does vLLM start, and with which words and variables?

Read are simple assignments, `export`, and the one command that starts vLLM. What something else may set is unknown,
never guessed.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.listed import unlisted
from zerodrift.doctor.secrets import hidden
from zerodrift.doctor.vllm_flags import flag_names

PIPELINERL = "pipelinerl.entrypoints.run_vllm1"
MODULES = ("vllm.entrypoints.openai.api_server", PIPELINERL)
_TOKEN = re.compile(
    r"""[ \t\r]+|\\\n|\\$|\#[^\n]*|(?P<redirect>\d*(?:&>|[<>])[<>&|]*\d*)|(?P<operator>[\n|&;()]+)
    |(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\[^\n]|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`|[^\s'"\\|&;<>()`])+)""",
    re.VERBOSE | re.DOTALL,
)
_REFERENCE = re.compile(r"([\w.-]+=)?(\"?)\$(?:(\w+)|\{(\w+)\})\2")
_PLAIN = re.compile(r"[\w@%+=:,./ -]*")
"""A value that means the same wherever the shell puts it."""
_ASSIGNMENT = re.compile(r"(-e=?|--env=)?([A-Za-z_]\w*)(?:=(.*))?", re.DOTALL)
_CONTAINER = re.compile(r"(?:.*/)?(?:docker|podman|nerdctl)")
# Its entrypoint is the server: what follows the image are flags.
_IMAGE = re.compile(r"(?:[\w.:-]+/)*vllm/vllm-openai(?:-\w+)?(?::[\w.-]+)?(?:@sha256:\w+)?")
_BRANCHES = re.compile(r"if|for|while|until|case|select|function|\{")
_OUT_OF_SIGHT = re.compile(
    r"(?:source|\.|eval|module|conda|micromamba|read|unset|set( \S+)* -[a-z]*a)( .*)?", re.DOTALL
)
"""May set any variable."""


class Word(NamedTuple):
    """One word as vLLM sees it, and where it is written."""

    text: str
    start: int
    end: int
    unknown: bool = False
    """Whether the shell puts something in that is not known here."""


class Launch(NamedTuple):
    """The command that starts vLLM."""

    words: Sequence[Word]
    behind: int
    """Index of the first word behind the program."""
    env: Mapping[str, str | None]
    """Variables that vLLM is started with; None where the value is not known here."""
    places: Mapping[str, int]
    """Indices of the words that set them."""
    unexported: tuple[str, ...]
    out_of_sight: bool
    """Whether something else may set variables."""
    alone: bool
    """Whether the text is this command and nothing else, so that it can be edited."""
    contained: bool

    @property
    def is_vllm(self) -> bool:
        """Whether it is vLLM's own server, which has these flags and no other."""
        return not self.words[self.behind - 1].text.endswith(PIPELINERL)


def find(text: str) -> Launch:
    """The one vLLM command of a text."""
    commands, conditional = _commands(text)
    starting = [i for i, words in enumerate(commands) if _behind([text[start:end] for start, end in words])]
    if len(starting) != 1:
        raise ConfigError(
            "this is no vLLM server command: it holds neither `vllm serve` nor `-m vllm.entrypoints.openai.api_server` "
            "nor `docker run … vllm/vllm-openai`"
            if not starting
            else "vLLM is started in several places; give the doctor one of the commands"
        )
    which = starting[0]
    if any(text[words[0][0]] == "-" for words in commands[which + 1 :]):
        raise ConfigError(
            "a line break ends the vLLM command, and flags follow; end each line of it with a backslash"
        )
    variables: dict[str, str | None] = {}
    exported: set[str] = set()
    branches = out_of_sight = False
    for index, places in enumerate(commands[:which]):
        first = text[slice(*places[0])]
        branches |= index in conditional or _BRANCHES.fullmatch(first) is not None
        if _OUT_OF_SIGHT.fullmatch(text[places[0][0] : places[-1][1]]):
            out_of_sight, variables = True, dict.fromkeys(variables)
        _assign(_words(text, places, variables), variables, exported, certain=not branches)
    words = _words(text, commands[which], variables)
    launch = _launch(words, {name: variables.get(name) for name in exported}, alone=len(commands) == 1)
    return launch._replace(
        unexported=tuple(name for name in variables if name not in launch.env),
        out_of_sight=launch.out_of_sight or (out_of_sight and not launch.contained),
    )


def _commands(text: str) -> tuple[list[list[tuple[int, int]]], set[int]]:
    """Places of the words of simple commands, and indices of those that run only if another did."""
    found: list[list[tuple[int, int]]] = [[]]
    conditional: set[int] = set()
    position, to_a_file = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ConfigError("a quote is opened and never closed in the command; close it")
        position = match.end()
        if match["redirect"]:
            if "<<" in match[0]:
                raise ConfigError("a here-document is not read; give the vLLM command alone")
            to_a_file = not match[0][-1].isdigit()
        elif match["operator"]:
            found += [[]] if found[-1] else []
            conditional |= {len(found) - 1} if match[0].strip() in ("&&", "||") else set()
        elif match["word"] and to_a_file:
            to_a_file = False
        elif match["word"]:
            found[-1].append(match.span())
    return [words for words in found if words], conditional


def _words(text: str, places: Sequence[tuple[int, int]], variables: Mapping[str, str | None]) -> list[Word]:
    """With the variables that are known put in; without quotes a blank in one makes two words."""
    found: list[Word] = []
    for start, end in places:
        raw = text[start:end]
        match = _REFERENCE.fullmatch(raw)
        value = variables.get(match[3] or match[4]) if match else None
        if match and value is not None and _PLAIN.fullmatch(value):
            raw = f"{match[1] or ''}{match[2]}{value}{match[2]}"
        # Between double quotes an apostrophe is one, so that single quotes there keep nothing from the shell.
        bare = raw if '"' in re.sub(r"^[\w.-]*='.*'$|^'.*'$", "", raw) else re.sub(r"'[^']*'|\\.", "", raw)
        try:
            texts = shlex.split(raw)
        except ValueError:
            texts = [raw]
        found += [Word(each, start, end, bool(re.search(r"[$`]", bare))) for each in texts]
    return found


def _assign(
    words: list[Word], variables: dict[str, str | None], exported: set[str], *, certain: bool
) -> None:
    """A line before the command that sets variables; every other is passed over."""
    while words and words[0].text in ("then", "else", "do", "{"):
        words = words[1:]
    declares = bool(words) and words[0].text in ("export", "declare", "local", "readonly", "typeset")
    exports = declares and words[0].text == "export"
    matches = [_ASSIGNMENT.fullmatch(word.text) for word in words[declares:]]
    if not declares and not all(match and match[3] is not None for match in matches):
        return
    for word, match in zip(words[declares:], matches, strict=True):
        if match and match[3] is not None:
            variables[match[2]] = match[3] if certain and not word.unknown else None
        if exports and match and match[2] in variables:  # other words may be pieces of a secret
            exported.add(match[2])


def _launch(words: Sequence[Word], outside: Mapping[str, str | None], *, alone: bool) -> Launch:
    texts = [word.text for word in words]
    behind = _behind(texts)
    inside = next((i for i in range(behind) if _CONTAINER.fullmatch(texts[i])), -1)
    contained = inside >= 0
    if contained and any(text.partition("=")[0] == "--entrypoint" for text in texts[:behind]):
        raise ConfigError(
            "--entrypoint puts another program in place of the image's; give the vLLM command alone"
        )
    env: dict[str, str | None] = {} if contained else dict(outside)
    places: dict[str, int] = {}
    out_of_sight = any(text.startswith(("--env-file", "--export")) for text in texts[:behind])
    masks = zip(hidden(texts, flag_names()), unlisted(texts, behind), strict=True)
    for index, either in zip(range(behind), masks, strict=False):
        a_value = any((mask or "").startswith('"') for mask in either)
        match = _ASSIGNMENT.fullmatch(texts[index])
        handed_in = bool(match and match[1]) or (index > 0 and texts[index - 1] in ("-e", "--env"))
        if texts[index].rpartition("/")[2] == "env" and texts[index + 1].startswith("-"):
            env, out_of_sight = {}, True  # `-i` and `-u` take variables away
        elif match and not a_value and (handed_in if contained else match[3] is not None):
            env[match[2]], places[match[2]] = None if words[index].unknown else match[3], index
    return Launch(words, behind, env, places, (), out_of_sight, alone, contained)


def _behind(words: Sequence[str]) -> int:
    """Index of the first word behind the program; 0 where there is none."""
    contained = False
    for index, (text, following) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        contained |= _CONTAINER.fullmatch(text) is not None
        if (contained and _IMAGE.fullmatch(text)) or (text[:2] == "-m" and text[2:] in MODULES):
            return index + 1
        if (text.rpartition("/")[2] == "vllm" and following == "serve") or (
            text == "-m" and following in MODULES
        ):
            return index + 2
    return 0
