"""One setting as it will be in force, and who says so."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

Value = bool | int | float | str | None
"""Settings are plain: what is a structure elsewhere (sampling defaults, overrides) is listed as text, or None."""


class Origin(StrEnum):
    """Who says so."""

    SET = "set"
    """It is written in what was given to us."""
    DEFAULT = "default"
    """Nobody wrote it; the version named by the target takes this."""
    CHECKPOINT = "checkpoint"
    """Nobody wrote it; the model's own files say so."""
    FRAMEWORK = "framework"
    """The trainer's launcher sets it, whatever the file says."""
    SERVER = "server"
    """The server shows it."""
    MEASURED = "measured"
    """The server was asked and behaved so."""
    ASKED = "asked"
    """Whoever called us said so."""
    UNKNOWN = "unknown"
    """It cannot be known from here."""


class Setting(msgspec.Struct, frozen=True):
    """A value in force; with origin UNKNOWN, `value` is None and says nothing."""

    name: str
    value: Value
    origin: Origin

    @property
    def known(self) -> bool:
        """Whether `value` means anything."""
        return self.origin is not Origin.UNKNOWN


Settings = Mapping[str, Setting]
"""By name. One that does not apply to a target is not there at all, which is not the same as unknown."""


def gathered(*settings: Setting) -> dict[str, Setting]:
    """Settings by name; a later one replaces an earlier."""
    return {setting.name: setting for setting in settings}


def unknown(name: str) -> Setting:
    """A setting that applies and cannot be seen."""
    return Setting(name, None, Origin.UNKNOWN)


def shown(value: Value) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
