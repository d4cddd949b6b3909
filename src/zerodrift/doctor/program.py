"""Where in a script does vLLM start, and with which variables? Everything before its first flag.

Variables are set in many places: before the command, by `env`, on `export` lines, by `docker run -e`. One that is
passed over would be judged by its default, and a secret in it would be printed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerodrift.core.errors import ConfigError
from zerodrift.doctor.secrets import names_a_secret
from zerodrift.doctor.shell_words import Word

PIPELINERL = "pipelinerl.entrypoints.run_vllm1"
MODULES = ("vllm.entrypoints.openai.api_server", PIPELINERL)
CONTAINERS = ("docker", "podman", "nerdctl")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# `-e A=1` is two words, `-eA=1` and `--env=A=1` are one; a bare name is passed on from outside.
_HANDED = re.compile(r"(-e=?|--env=)([A-Za-z_]\w*)(?:=(.*))?", re.DOTALL)
# Files of variables, and Slurm's list of them.
_ELSEWHERE = re.compile(r"--(?:env-file|export|export-file)(?:=.*)?", re.DOTALL)
_WITH_A_WORD = ("-C", "--chdir", "-S", "--split-string")
# Its entrypoint is the server: what follows the image are flags.
_IMAGE = re.compile(r"(?:[\w.:-]+/)*vllm/vllm-openai(?:-\w+)?(?::[\w.-]+)?(?:@sha256:\w+)?")


class Variable(NamedTuple):
    """NAME=VALUE, and the word that it stands in."""

    name: str
    value: str
    word: Word
    before: str = ""
    """What the word holds before the name, as in `-eNAME=VALUE`."""

    @property
    def seen(self) -> bool:
        """Whether the value is written here; a shell knows the others."""
        return not self.word.expands and "=" in self.word.text


class Program(NamedTuple):
    """The command that starts vLLM."""

    words: Sequence[Word]
    behind: int
    """Index of the first word behind the program."""
    written: tuple[Variable, ...]
    """Every NAME=VALUE before it, whether it gets there or not."""
    env: Mapping[str, Variable]
    """Those that vLLM is started with."""
    unread: tuple[str, ...]
    """What may set variables and is not followed here."""
    new_at: int
    """Where in the text a variable can be added."""
    new_as: str
    """And in which form."""

    @property
    def starts(self) -> int:
        """Index of its own first word: `vllm serve` and `-m MODULE` are two, an image is one."""
        return self.behind - (2 if self.words[self.behind - 1].text in ("serve", *MODULES) else 1)

    @property
    def is_vllm(self) -> bool:
        """Whether it is vLLM's own server, which has these flags and no other."""
        return not self.words[self.behind - 1].text.endswith(PIPELINERL)


class _Reader:
    """Goes over the words from the left, as whoever runs them would: what is set later replaces what was before."""

    def __init__(self) -> None:
        self.shell: dict[str, Variable] = {}
        self.env: dict[str, Variable] = {}
        self.written: list[Variable] = []
        self.unread: list[str] = []

    def line(self, words: Sequence[Word]) -> None:
        """A line before the command: variables, exported or not."""
        exports = words[0].text == "export"
        secret = ""
        for word in words[1:] if exports else words:
            if match := _ASSIGNMENT.fullmatch(word.text):
                self._add(Variable(match[1], match[2], word), self.env if exports else self.shell)
                secret = match[1] if names_a_secret(match[1]) else ""
            elif exports and word.text in self.shell:
                self.env[word.text] = self.shell[word.text]
            elif exports and secret:  # a piece of it, as in `export HF_TOKEN=my key`
                self.written.append(Variable(secret, word.text, word))
            elif not exports:
                shown = f"a word behind {secret}" if secret else repr(word.text)
                raise ConfigError(
                    f"a line holds {shown}, a command of its own; give the vLLM command on one line, or end each "
                    "line of it with a backslash, with nothing but variables and export lines before it"
                )

    def command(self, words: Sequence[Word]) -> int:
        """Words before the program; returns where in the text a variable may be added."""
        texts = [word.text for word in words]
        place = next((i for i, text in enumerate(texts) if not _ASSIGNMENT.fullmatch(text)), len(words))
        index = 0
        while index < len(words):
            if texts[index].rpartition("/")[2] == "env":
                index = place = self._options_of_env(texts, index + 1)
                continue
            if match := _ASSIGNMENT.fullmatch(texts[index]):
                self._add(Variable(match[1], match[2], words[index]), self.env)
            elif _ELSEWHERE.fullmatch(texts[index]):
                self.unread.append(f"{texts[index].partition('=')[0]} before the program")
            index += 1
        return place

    def container(self, words: Sequence[Word]) -> None:
        """Options of `docker run`: nothing from outside gets in that is not handed over."""
        outside, self.env = self.env, {}
        for index, word in enumerate(words):
            handed = _HANDED.fullmatch(word.text)
            if index and words[index - 1].text in ("-e", "--env"):
                name, equals, value = word.text.partition("=")
                found = Variable(name, value, word) if equals else outside.get(name, Variable(name, "", word))
                self._add(found, self.env)
            elif handed and handed[3] is not None:
                self._add(Variable(handed[2], handed[3], word, handed[1]), self.env)
            elif handed and word.text != "-e":
                self._add(outside.get(handed[2], Variable(handed[2], "", word, handed[1])), self.env)
            elif match := _ASSIGNMENT.fullmatch(word.text):  # a label, perhaps: nothing to judge, all to hide
                self.written.append(Variable(match[1], match[2], word))
            elif _ELSEWHERE.fullmatch(word.text):
                self.unread.append(f"{word.text.partition('=')[0]} before the program")

    def _add(self, variable: Variable, where: dict[str, Variable]) -> None:
        where[variable.name] = variable
        if "=" in variable.word.text:
            self.written.append(variable)

    def _options_of_env(self, texts: Sequence[str], index: int) -> int:
        """Index behind them; `-i` and `-u` take variables away."""
        while index < len(texts) and texts[index].startswith("-"):
            option, _, value = texts[index].partition("=")
            if option in ("-i", "-", "--ignore-environment"):
                self.env.clear()
            elif option == "-u" or (option == "--unset" and not value):
                index += 1
                self.env.pop("".join(texts[index : index + 1]), None)
            elif option == "--unset" or option.startswith("-u"):
                self.env.pop(value or option.removeprefix("-u"), None)
            elif option in _WITH_A_WORD and not value:
                index += 1
            index += 1
        return index


def find(commands: Sequence[Sequence[Word]]) -> Program:
    """The vLLM command, and what the lines before it export."""
    if not commands:
        raise ConfigError("there is no command in this, only comments; give the vLLM command")
    reader = _Reader()
    which = next((i for i, words in enumerate(commands) if _behind_program(words)), len(commands) - 1)
    words = commands[which]
    behind = _behind_program(words)
    if not behind:
        raise ConfigError(
            "this is no vLLM server command: it holds neither `vllm serve` nor `-m vllm.entrypoints.openai.api_server` "
            "nor `docker run … vllm/vllm-openai`"
        )
    if len(commands) > which + 1:
        raise ConfigError(
            "a line break ends the vLLM command, and more follows; end each line of the command with a backslash, or "
            "leave out what follows"
        )
    for line in commands[:which]:
        reader.line(line)
    inside = _container(words[:behind])
    place = reader.command(words[: inside or behind])
    if inside:
        reader.container(words[inside:behind])
    missing = [f"{name}, which is set and not exported" for name in reader.shell if name not in reader.env]
    return Program(
        words,
        behind,
        tuple(reader.written),
        reader.env,
        (*reader.unread, *missing),
        new_at=words[inside].start if inside else words[place].start,
        new_as="-e {} " if inside else "{} ",
    )


def _behind_program(words: Sequence[Word]) -> int:
    """Index of the first word behind the program; 0 where there is none."""
    texts = [word.text for word in words]
    contained = _container(words)
    for index, (text, following) in enumerate(zip(texts, [*texts[1:], ""], strict=True)):
        if contained and index >= contained and _IMAGE.fullmatch(text):
            if any(word.partition("=")[0] == "--entrypoint" for word in texts[:index]):
                raise ConfigError(
                    "--entrypoint puts another program in place of the image's server; give the vLLM command alone"
                )
            return index + 1
        if text.rpartition("/")[2] == "vllm" and following == "serve":
            return index + 2
        if text == "-m" and following in MODULES:
            return index + 2
        if text.startswith("-m") and text.removeprefix("-m") in MODULES:
            return index + 1
    return 0


def _container(words: Sequence[Word]) -> int:
    """Index of the first option of `docker run`; 0 where there is no such thing."""
    texts = [word.text for word in words]
    for index, text in enumerate(texts):
        if text.rpartition("/")[2] in CONTAINERS:
            return next((i + 1 for i in range(index, len(texts)) if texts[i] in ("run", "exec")), 0)
    return 0
