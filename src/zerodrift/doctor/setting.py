"""One setting as it will be in force, who says so, and what settings are read from."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

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


def unknown(name: str) -> Setting:
    """A setting that applies and cannot be seen."""
    return Setting(name, None, Origin.UNKNOWN)


class FileKind(StrEnum):
    """Whose configuration a file is: told by its keys, or by its owner."""

    VLLM = "vllm"
    TRL = "trl"
    PIPELINERL = "pipelinerl"
    VERL = "verl"
    SKYRL = "skyrl"
    ZERODRIFT = "zerodrift"


class Reading(NamedTuple):
    """All that was found in a target."""

    settings: Settings
    not_judged: tuple[str, ...]
    """Flags, keys and lines that no rule reads; nothing is passed over in silence."""
    unseen: str = ""
    """How to let us see more, where most of the settings are hidden."""
    server: str = ""
    """The running server that it names, which knows its own settings better; empty where it names none."""


class Target(Protocol):
    """A command line, a file or a server."""

    @property
    def title(self) -> str:
        """What it is, and of which version defaults are."""

    def read(self) -> Reading:
        """The settings in force."""

    def typed(self, name: str, value: Value) -> str | None:
        """How a setting is written here; None where it cannot be."""

    def corrected(self, changes: Mapping[str, Value]) -> "Target | None":
        """The same with those of `changes` that can be written here; None where it has to be done by hand."""

    def printed(self) -> str:
        """Its text without secrets."""
