"""`verdict.json`: what an audit concluded, for machines and for the report."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from zerodrift.core.completion import EngineFingerprint
from zerodrift.core.frozen import freeze

SCHEMA = "zerodrift.verdict/1"


class Outcome(StrEnum):
    """PASS is said only when every required question was asked and answered."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 gate failed, 3 could not judge."""
        return {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 3}[self]


class CauseFound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named cause with its evidence and its fix."""

    cause: str
    gating: bool
    explained: float
    """Share of the difference that goes away under the hypothesis."""
    interval: tuple[float, float]
    evidence: str
    fix: str
    found_by: str
    """The probe that found it."""


class ProbeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question and its answer."""

    name: str
    status: Outcome
    required: bool
    """Whether the verdict waits for it."""
    vacuous: bool = False
    """The question was asked and its premise did not hold (no batch formed, no cache hit)."""
    cut_off: bool = False
    """The engine failed while it was asked; what came before is kept, and the run can be resumed."""
    says: str
    evidence: Mapping[str, float | int | str | bool] = {}
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Evidence is not touched after the fact."""
        freeze(self, "evidence")


class VerdictRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole conclusion."""

    schema: str = SCHEMA
    verdict: Outcome
    guilty: str
    """Which side left the other two: `engine`, `trainer`, `none` or `unknown`."""
    says: str
    """The conclusion in one sentence."""
    engine: EngineFingerprint
    reference: EngineFingerprint
    model: str
    precision: str
    floor: Mapping[str, float]
    metrics: Mapping[str, float]
    gates: Mapping[str, float]
    causes: tuple[CauseFound, ...] = ()
    """The first is the principal one."""
    probes: tuple[ProbeRecord, ...] = ()
    reproduce: str = ""
    """A command that repeats the audit."""
    smallest: str = ""
    """The smallest request that still shows the difference, in words; empty where there is none."""
    reproduce_smallest: str = ""
    """A command that repeats only that."""

    def __post_init__(self) -> None:
        """What was concluded stays."""
        freeze(self, "floor", "metrics", "gates")
