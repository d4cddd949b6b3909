"""What every probe gives back: an answer, the evidence, and the causes it can name by itself."""

import msgspec

from zerodrift.core.cause import CAUSES
from zerodrift.core.errors import EngineError
from zerodrift.records.evidence import Evidence
from zerodrift.records.verdict import CauseFound, FoundBy, Outcome, Probe, ProbeRecord

UNSTEADY = "path/nondeterminism"
"""What an engine has that answers the same question in two ways."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """A question, its answer and what it rests on."""

    probe: Probe
    status: Outcome
    message: str
    evidence: Evidence | None = None
    causes: tuple[CauseFound, ...] = ()
    required: bool = False
    """The verdict waits for it."""
    vacuous: bool = False
    """Asked, and its premise did not hold: nothing was learnt."""
    cut_off: bool = False
    """The engine failed while it was asked."""
    seconds: float = 0.0

    @property
    def record(self) -> ProbeRecord:
        """As a verdict keeps it."""
        return ProbeRecord(
            name=self.probe.value,
            status=self.status,
            required=self.required,
            vacuous=self.vacuous,
            cut_off=self.cut_off,
            message=self.message,
            evidence={} if self.evidence is None else self.evidence.as_record(),
            seconds=self.seconds,
        )


def answered(
    probe: Probe,
    status: Outcome,
    message: str,
    evidence: Evidence | None = None,
    *,
    required: bool = False,
    causes: tuple[CauseFound, ...] = (),
) -> ProbeResult:
    """The question was asked and answered."""
    return ProbeResult(
        probe=probe, status=status, message=message, evidence=evidence, causes=causes, required=required
    )


def vacuous(
    probe: Probe, message: str, evidence: Evidence | None = None, *, required: bool = False
) -> ProbeResult:
    """The question was asked and its premise did not hold: nothing was learnt."""
    result = answered(probe, Outcome.INCONCLUSIVE, message, evidence, required=required)
    return msgspec.structs.replace(result, vacuous=True)


def not_judged(probe: Probe, message: str, *, required: bool = False) -> ProbeResult:
    """The engine cannot answer."""
    return answered(probe, Outcome.INCONCLUSIVE, message, required=required)


def cut_off(probe: Probe, error: EngineError) -> ProbeResult:
    """The engine failed while answering: not judged is not passed, and asking again may help."""
    result = not_judged(probe, f"the engine failed: {error}", required=True)
    return msgspec.structs.replace(result, cut_off=True)


def found(  # noqa: PLR0913 - the fields of a cause
    cause: str,
    engine: str,
    by: Probe | FoundBy,
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
        found_by=by.value,
    )


def with_fix(cause: CauseFound, fix: str) -> CauseFound:
    """The same cause, with a fix for this finding alone."""
    return msgspec.structs.replace(cause, fix=fix, particular_fix=True)
