"""What differs between two launch lines, as changes that can be made one after the other?"""

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from zerodrift.core.errors import ConfigError

_FLAG = re.compile(r"--?[A-Za-z]")
OURS = ("--model", "--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile")
"""Where the server is found and what it serves is said by whoever starts it."""
BEFORE_FLAGS = "a launch line is flags alone, as in '--dtype float32 --enforce-eager'"


class LaunchFlag(NamedTuple):
    """One flag with what follows it."""

    flag: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """As it is typed."""
        return shlex.join(self.words)


class FlagChange(NamedTuple):
    """One flag that one line has and the other has not, or has otherwise."""

    before: tuple[LaunchFlag, ...]
    after: tuple[LaunchFlag, ...]

    @property
    def text(self) -> str:
        """As a person says it."""
        taken = " ".join(setting.text for setting in self.before)
        if not self.after:
            return f"without {taken}"
        given = " ".join(setting.text for setting in self.after)
        return f"{given} in place of {taken}" if taken else given


def read_line(text: str) -> list[LaunchFlag]:
    """Flags with their values, in order; a flag may come twice."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--flags {text!r} cannot be read as words: {error}") from error
    found: list[LaunchFlag] = []
    for word in words:
        if _FLAG.match(word):
            flag = _canonical(word)
            if flag in OURS:
                raise ConfigError(
                    f"--flags has {flag}, which is set for every server that is started here; leave it out"
                )
            found.append(LaunchFlag(flag, (word,)))
        elif not found:
            raise ConfigError(f"--flags {text!r} begins with {word!r}, which is no flag; {BEFORE_FLAGS}")
        else:
            found[-1] = found[-1]._replace(words=(*found[-1].words, word))
    return found


def changes(before: Sequence[LaunchFlag], after: Sequence[LaunchFlag]) -> list[FlagChange]:
    """What makes the one line the other: first what only the first has, or both have otherwise, then what is new."""
    names = list(dict.fromkeys(setting.flag for setting in (*before, *after)))
    found = [FlagChange(_of(before, name), _of(after, name)) for name in names]
    return [change for change in found if _values(change.before) != _values(change.after)]


def applied(before: Sequence[LaunchFlag], made: Sequence[FlagChange]) -> list[str]:
    """The words of the first line with these changes."""
    gone = {setting.flag for change in made for setting in change.before}
    kept = [setting for setting in before if setting.flag not in gone]
    new = [setting for change in made for setting in change.after]
    return [word for setting in (*kept, *new) for word in setting.words]


def _canonical(word: str) -> str:
    """vLLM takes `--a_b` for `--a-b`; `--no-x` and `--x` are two words for one switch."""
    flag = word.partition("=")[0]
    if not flag.startswith("--"):
        return flag
    flag = flag.replace("_", "-")
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else flag


def _of(line: Sequence[LaunchFlag], flag: str) -> tuple[LaunchFlag, ...]:
    return tuple(setting for setting in line if setting.flag == flag)


def _values(settings: Sequence[LaunchFlag]) -> list[tuple[str, ...]]:
    """`--a=1` and `--a 1` are the same."""
    found = []
    for setting in settings:
        first, equals, value = setting.words[0].partition("=")
        name = first.replace("_", "-") if first.startswith("--") else first
        found.append((name, *([value] if equals else []), *setting.words[1:]))
    return found
