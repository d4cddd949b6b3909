"""A launch line of a trainer, read as the file that its words make: `python -m verl.trainer.main_ppo KEY=VALUE …`,
`-m skyrl.train.entrypoints.main_base KEY=VALUE …`, `-m openrlhf.cli.train_ppo_ray --KEY VALUE …`.

The rest of a script is not run: of a value that the shell fills in (`…temperature=$T`) is known that it is not known.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zerodrift.backends.json_path import put
from zerodrift.config.document import parse, render
from zerodrift.core.errors import ConfigError
from zerodrift.doctor import secrets
from zerodrift.doctor.setting import Reading, Target, Value
from zerodrift.doctor.table_files import OpenRlhfFlags, SkyRlFile, VerlFile
from zerodrift.doctor.yaml_text import YamlText

_OVERRIDE = re.compile(r"\+{0,2}(?P<path>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
_FLAG = re.compile(r"--(?P<path>[A-Za-z_][\w.]*)(?:=(?P<value>.*))?", re.DOTALL)
_FROM_SHELL = "${from the shell}"
"""An interpolation that points nowhere: unknown, as any of a file is."""


class Words(NamedTuple):
    """What the words behind a program say."""

    given: Sequence[tuple[str, object]]
    """Paths of keys with their values."""
    others: Sequence[str]
    """Words that are neither."""


def _overrides(words: Sequence[str]) -> Words:
    """Hydra's."""
    matches = [_OVERRIDE.fullmatch(word) for word in words]
    return Words(
        [(match["path"], _value(match["value"])) for match in matches if match],
        [word for word, match in zip(words, matches, strict=True) if not match],
    )


def _flags(words: Sequence[str]) -> Words:
    """argparse's: what follows a flag is its value, and one that nothing follows is a switch."""
    given: list[tuple[str, list[object]]] = []
    others = []
    for word in words:
        if match := _FLAG.fullmatch(word):
            value = match["value"]
            given.append((match["path"], [] if value is None else [_value(value)]))
        elif not given or ("$" in word and given[-1][1]):  # "$@" behind a value may hold any flag
            others.append(word)
        else:
            given[-1][1].append(_value(word))
    return Words([(path, _one(values)) for path, values in given], others)


def _one(values: list[object]) -> object:
    return True if not values else values[0] if len(values) == 1 else values


class Launcher(NamedTuple):
    """Whose keys the words of a program are, and how they are written."""

    file: Callable[[YamlText], Target]
    read: Callable[[Sequence[str]], Words]


MODULES: Mapping[str, Launcher] = {
    "verl.trainer.main_ppo": Launcher(VerlFile, _overrides),
    "skyrl.train.entrypoints.main_base": Launcher(SkyRlFile, _overrides),
    "openrlhf.cli.train_ppo_ray": Launcher(OpenRlhfFlags, _flags),
}


class LaunchLine:
    """One launch, with what it sets; corrections are typed as it writes them, by hand."""

    def __init__(self, module: str, words: Sequence[str]) -> None:
        launch = MODULES[module]
        read = launch.read(words)
        values: dict[str, Any] = {}
        for path, value in read.given:
            try:
                put(values, path.replace(".", "/"), value)
            except (AttributeError, TypeError) as error:
                raise ConfigError(
                    f"{path} is given a value and keys below it; leave one of them out"
                ) from error
        self._others = tuple(secrets.safe(word) for word in read.others)
        self._file = launch.file(YamlText(render(values), "the launch line"))
        self.title = f"launch line, {self._file.title}"

    def read(self) -> Reading:
        """As of the file."""
        reading = self._file.read()
        return reading._replace(not_judged=(*reading.not_judged, *self._others))

    def typed(self, name: str, value: Value) -> str | None:
        """As an override, or a flag."""
        return self._file.typed(name, value)

    def corrected(self, changes: Mapping[str, Value]) -> Target | None:
        """A script is its owner's to change."""
        return None

    def printed(self) -> str:
        """What it sets, without secrets."""
        return self._file.printed()


def find_launch(text: str) -> LaunchLine | None:
    """The one launch that a command or a script holds; None where there is none."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    started = [
        (line, module)
        for line in lines
        for module in MODULES
        if f"-m {module}" in line and not _is_comment(line)
    ]
    if not started:
        return None
    if len(started) > 1:
        raise ConfigError(
            f"{len(started)} launches of {started[0][1]} stand in it; give the one that is meant"
        )
    line, module = started[0]
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"the launch of {module} cannot be read ({error}); check its quotes") from error
    if module not in words:
        raise ConfigError(f"the launch of {module} is inside quotes; give the command itself")
    return LaunchLine(module, words[words.index(module) + 1 :])


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _value(text: str) -> object:
    """As Hydra reads a value; what is no YAML is text."""
    if "$" in text or "`" in text:
        return _FROM_SHELL
    try:
        read = parse(f"value: {text}" if text else "value: ''", "an override")
    except ConfigError:
        return text
    return read["value"] if isinstance(read, dict) and read.keys() == {"value"} else text
