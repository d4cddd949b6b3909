"""A launch line of verl or SkyRL: `python -m verl.trainer.main_ppo KEY=VALUE …`, read as the file that its overrides make.

The rest of a script is not run: of a value that the shell fills in (`…temperature=$T`) is known that it is not known.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from zerodrift.backends.json_path import put
from zerodrift.config.document import parse, render
from zerodrift.core.errors import ConfigError
from zerodrift.doctor import secrets
from zerodrift.doctor.setting import Reading, Target, Value
from zerodrift.doctor.table_files import SkyRlFile, TableFile, VerlFile
from zerodrift.doctor.yaml_text import YamlText

MODULES: Mapping[str, type[TableFile]] = {
    "verl.trainer.main_ppo": VerlFile,
    "skyrl.train.entrypoints.main_base": SkyRlFile,
}
"""What is started, and whose keys its overrides are."""
_OVERRIDE = re.compile(r"\+{0,2}(?P<path>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
_FROM_SHELL = "${from the shell}"
"""An interpolation that points nowhere: unknown, as any of a file is."""


class HydraCommand:
    """One launch, with its overrides; corrections are typed as overrides, by hand."""

    def __init__(self, module: str, words: list[str]) -> None:
        values: dict[str, Any] = {}
        self._others = []
        for word in words:
            match = _OVERRIDE.fullmatch(word)
            if match is None:
                self._others.append(secrets.safe(word))
                continue
            try:
                put(values, match["path"].replace(".", "/"), _value(match["value"]))
            except (AttributeError, TypeError) as error:
                raise ConfigError(
                    f"{match['path']} is given a value and keys below it; leave one of them out"
                ) from error
        self._file = MODULES[module](YamlText(render(values), "the overrides"))
        self.title = f"launch line, {self._file.title}"

    def read(self) -> Reading:
        """As of the file."""
        reading = self._file.read()
        return reading._replace(not_judged=(*reading.not_judged, *self._others))

    def typed(self, name: str, value: Value) -> str | None:
        """As an override."""
        return self._file.typed(name, value)

    def corrected(self, changes: Mapping[str, Value]) -> Target | None:
        """A script is its owner's to change."""
        return None

    def printed(self) -> str:
        """The overrides without secrets."""
        return self._file.printed()


def find_launch(text: str) -> HydraCommand | None:
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
    return HydraCommand(module, words[words.index(module) + 1 :])


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
