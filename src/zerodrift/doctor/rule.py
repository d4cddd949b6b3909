"""The decision matrix is data: what a rule is, and how the files in `rules/` are read.

A rule fires where all of `when` holds and none of `unless` does. A condition on a setting that is unknown is itself
unknown; one on a setting that does not apply fails.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any

import msgspec

from zerodrift.core.frozen import freeze
from zerodrift.doctor.setting import Value
from zerodrift.doctor.tables import read_table


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


Test = Mapping[str, Any]
"""How a setting is compared, and with what: one of `HOW`, or `known`. Text that starts with $ names another setting."""


def _same(value: Value, other: Any) -> bool:
    """1 and 1.0 are the same setting; 1 and true are not."""
    return bool(value == other) and isinstance(value, bool) is isinstance(other, bool)


def _above(value: Any, other: Any) -> bool:
    """Of numbers; nothing else is above or below anything."""
    numbers = [
        each for each in (value, other) if isinstance(each, int | float) and not isinstance(each, bool)
    ]
    return len(numbers) == 2 and value > other


HOW: Mapping[str, Callable[[Value, Any], bool]] = {
    "is": _same,
    "not": lambda value, other: not _same(value, other),
    "in": lambda value, others: any(_same(value, each) for each in others),
    "not in": lambda value, others: not any(_same(value, each) for each in others),
    "starts with": lambda value, others: (
        value in others
        or (isinstance(value, str) and value.startswith(tuple(each for each in others if each)))
    ),
    "above": _above,
    "below": lambda value, other: _above(other, value),
}


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
        for test in (*self.when.values(), *self.unless.values()):
            if len(test) != 1 or not test.keys() <= {*HOW, "known"}:
                raise ValueError(f"rule {self.id}: a test compares in one way, not as {dict(test)}")
        if not self.fix and not self.do:
            raise ValueError(f"rule {self.id} names neither a fix nor what to do")


# In the order in which findings of one severity are shown.
SUBJECTS = ("meaning", "precision", "path", "weights", "trainer", "exposure")


@cache
def rules() -> tuple[Rule, ...]:
    """All of them, in order."""
    return tuple(rule for subject in SUBJECTS for rule in read_table(f"rules/{subject}", list[Rule]))
