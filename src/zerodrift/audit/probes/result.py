"""What every probe gives back: an answer, the evidence, and the causes it can name by itself."""

from collections.abc import Mapping
from typing import NamedTuple

from zerodrift.core.cause import CAUSES
from zerodrift.core.errors import EngineError
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord

Evidence = Mapping[str, float | int | str | bool]


class ProbeResult(NamedTuple):
    """A probe's record and the causes it found."""

    record: ProbeRecord
    causes: tuple[CauseFound, ...] = ()


def answered(
    name: str,
    status: Outcome,
    says: str,
    evidence: Evidence | None = None,
    *,
    required: bool = False,
    causes: tuple[CauseFound, ...] = (),
) -> ProbeResult:
    """The question was asked and answered."""
    record = ProbeRecord(name=name, status=status, says=says, evidence=evidence or {}, required=required)
    return ProbeResult(record, causes)


def vacuous(name: str, says: str, evidence: Evidence | None = None, *, required: bool = False) -> ProbeResult:
    """The question was asked and its premise did not hold: nothing was learnt."""
    record = ProbeRecord(
        name=name,
        status=Outcome.INCONCLUSIVE,
        says=says,
        evidence=evidence or {},
        required=required,
        vacuous=True,
    )
    return ProbeResult(record)


def not_judged(name: str, says: str, *, required: bool = False) -> ProbeResult:
    """The engine cannot answer."""
    return ProbeResult(ProbeRecord(name=name, status=Outcome.INCONCLUSIVE, says=says, required=required))


def cut_off(name: str, error: EngineError) -> ProbeResult:
    """The engine failed while answering: not judged is not passed, and asking again may help."""
    says = f"the engine failed: {error}"
    record = ProbeRecord(name=name, status=Outcome.INCONCLUSIVE, says=says, required=True, cut_off=True)
    return ProbeResult(record)


def found(  # noqa: PLR0913 - the fields of a cause
    cause: str,
    engine: str,
    probe: str,
    evidence: str,
    *,
    explained: float = 1.0,
    interval: tuple[float, float] | None = None,
    gating: bool | None = None,
) -> CauseFound:
    """A cause with its fix for `engine`; whether it gates is the cause's own unless a probe knows better."""
    known = CAUSES[cause]
    return CauseFound(
        cause=cause,
        gating=known.gating if gating is None else gating,
        explained=explained,
        # A count is exact: its interval is itself.
        interval=(explained, explained) if interval is None else interval,
        evidence=evidence,
        fix=known.fix(engine),
        found_by=probe,
    )
