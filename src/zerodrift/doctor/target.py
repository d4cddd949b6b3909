"""What a configuration is to the doctor, wherever it came from: settings to judge, and words to change them with."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from zerodrift.doctor.setting import Settings, Value


class Reading(NamedTuple):
    """All that was found."""

    settings: Settings
    not_judged: tuple[str, ...]
    """Flags, keys and lines that no rule reads; nothing is passed over in silence."""
    unseen: str = ""
    """How to let us see more, where most of the settings are hidden."""


class Target(Protocol):
    """A command line, a file or a server."""

    @property
    def title(self) -> str:
        """What it is, and of which version defaults are."""

    def read(self) -> Reading:
        """The settings in force."""

    def typed(self, name: str, value: Value) -> str | None:
        """How a setting is written here; None where it cannot be."""

    def changed(self, changes: Mapping[str, Value]) -> str:
        """The whole text with these settings, everything else as it was; secrets are not in it."""
