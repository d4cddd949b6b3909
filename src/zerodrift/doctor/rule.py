"""The decision matrix is data: what a rule is, and how the files in `rules/` are read.

A rule fires where all of `when` holds and none of `unless` does. A condition on a setting that is unknown is itself
unknown; one on a setting that does not apply fails.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib.resources import files

import msgspec

from zerodrift.config.document import parse
from zerodrift.core.frozen import freeze
from zerodrift.doctor.setting import Value


class Severity(StrEnum):
    """How bad, worst first."""

    WRONG = "wrong"
    """Logprobs, tokens or weights are not those that the trainer assumes."""
    RISK = "risk"
    """They are right until something that happens in RL happens."""
    NOTE = "note"
    """Right, and worth knowing when numbers are compared."""
    UNKNOWN = "unknown"
    """It decides, and it cannot be seen from here."""
    FINE = "fine"
    """Nothing to say against it."""


class Test(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a setting is compared with; exactly one field is given. Text that starts with $ names another setting."""

    __test__ = False  # pytest would take it for one of its own

    is_: Value | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="is")
    not_: Value | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="not")
    in_: tuple[Value, ...] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="in")
    not_in: tuple[Value, ...] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="not in")
    starts_with: tuple[str | None, ...] | msgspec.UnsetType = msgspec.field(
        default=msgspec.UNSET, name="starts with"
    )
    above: float | str | msgspec.UnsetType = msgspec.UNSET
    below: float | str | msgspec.UnsetType = msgspec.UNSET
    known: bool | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """A test of nothing would hold always, and one of two things would hide the second."""
        if len(self.given) != 1:
            raise ValueError(f"a test compares with one thing, not with {list(self.given)}")

    @property
    def given(self) -> dict[str, object]:
        """The field that is given, by its name here."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in fields.items() if value is not msgspec.UNSET}


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the decision matrix."""

    id: str
    setting: str
    """The setting that the finding is about."""
    when: Mapping[str, Test]
    unless: Mapping[str, Test] = {}
    severity: Severity
    cause: str | None = None
    """What an audit would call it, where an audit can find it."""
    message: str
    """Why, in one or two sentences; {name} stands for the value of a setting."""
    source: tuple[str, ...]
    """Where it was reported or read."""
    fix: Mapping[str, Value] = {}
    """Settings that cure it; `--fix` writes them for rules that are wrong or risky. $name copies another setting."""
    do: str = ""
    """What to do where there is no setting to change, or beside it."""

    def __post_init__(self) -> None:
        """Rules do not change, and each can be acted upon."""
        freeze(self, "when", "unless", "fix")
        if not self.fix and not self.do:
            raise ValueError(f"rule {self.id} names neither a fix nor what to do")


# In the order in which findings of one severity are shown.
SUBJECTS = ("meaning", "precision", "path", "weights", "trainer", "exposure")


@cache
def rules() -> tuple[Rule, ...]:
    """All of them, in order."""
    return tuple(rule for subject in SUBJECTS for rule in _read(subject))


def _read(subject: str) -> list[Rule]:
    name = f"{subject}.yaml"
    text = (files("zerodrift.doctor") / "rules" / name).read_text(encoding="utf-8")
    return msgspec.convert(parse(text, name), list[Rule])
