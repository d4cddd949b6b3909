"""One conclusion from many probes: which side is wrong, why, and what to type.

PASS needs every required probe answered and no gating cause. A probe that could not be asked, or whose premise did
not hold, makes a required question INCONCLUSIVE; an optional one is listed as not judged.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from zerodrift.audit.attribute import Attribution, Finding
from zerodrift.audit.probes.parity import sampling_cause
from zerodrift.audit.probes.result import ProbeResult, found
from zerodrift.audit.probes.stream import NAME as STREAM
from zerodrift.core.cause import CAUSES, Layer
from zerodrift.records.verdict import CauseFound, Outcome
from zerodrift.stats.intervals import FEWEST_SEQUENCES

SIZE_ONLY = "attribution by size"
OTHER_MODEL = "weights/other-model"
OTHER_POLICIES = frozenset({"trainer", "weight-sync", "rewards"})
"""What these find is no account of the rollouts whose rewards were compared."""
COMPARABLE = 0.3
"""Two differences within this factor of each other may be one."""
LEAST_EXPLAINED = 0.5
"""Below this the difference has no name: `unexplained` is the truth."""
APPROXIMATE = frozenset(
    {"path/head-precision", "path/body-precision", "path/weight-quantisation", "path/kv-precision"}
)
"""Engines round in other places and by other schemes than the account: it explains most of Δ where it is true. Every
other account is exact where it is true, and brings Δ to the floor."""


class Conclusion(NamedTuple):
    """The verdict with its causes, principal first."""

    verdict: Outcome
    guilty: str
    says: str
    causes: tuple[CauseFound, ...]


def attributed(attribution: Attribution, engine: str, shape: str) -> tuple[CauseFound, ...]:
    """Findings as causes; `unexplained` where they leave most of the difference standing."""
    causes = [_as_cause(finding, engine) for finding in attribution.findings]
    explained = attribution.explained_to_floor or any(
        finding.cause in APPROXIMATE and finding.explained >= LEAST_EXPLAINED
        for finding in attribution.findings
    )
    if not explained:
        evidence = (
            f"no account brings Δ to the floor (median {attribution.residual_sigmas:.1f} σ left): {shape}"
        )
        unnamed = found("unexplained", engine, "attribution", evidence, explained=0.0, interval=(0.0, 0.0))
        # What explains a part is a hint, not a name.
        return (unnamed, *(msgspec.structs.replace(cause, gating=False) for cause in causes))
    return tuple(causes)


def _as_cause(finding: Finding, engine: str) -> CauseFound:
    evidence = f"{finding.says}: {finding.gain_nats:.0f} nats of evidence from what was {finding.channel}"
    if finding.channel == "size":
        evidence = f"{finding.says}: {finding.gain_nats:.0f} nats of evidence"
    evidence += _doubt(finding.sequences)
    return found(
        finding.cause,
        engine,
        SIZE_ONLY if finding.channel == "size" else "attribution",
        evidence,
        explained=finding.explained,
        interval=finding.interval,
        gating=True,
    )


def _doubt(sequences: int) -> str:
    """Why the share has no interval, where it has none."""
    if sequences >= FEWEST_SEQUENCES:
        return ""
    if not sequences:
        return "; no sequence chosen by chance shows it, and the share is that of the worst"
    return f"; the share is of {sequences} sequences, too few for an interval"


def reconcile(
    causes: tuple[CauseFound, ...], about_itself: Sequence[ProbeResult], mean: float, gate: float
) -> tuple[tuple[CauseFound, ...], list[ProbeResult]]:
    """What an engine disagrees with itself by may be the cause of a difference, or the consequence of another cause.

    A difference without a name, or named by its size alone, takes the name of a self-inconsistency that is as large
    and proves more. Where the difference has a better name, self-inconsistencies no larger than it are consequences
    and only listed. What only a stream does is neither: answers are compared that came whole.
    """
    unsteady = any(
        result.record.name == "repeat" and float(result.record.evidence.get("mean", 0.0)) > gate
        for result in about_itself
    )
    for result in about_itself:
        # Where the same question alone gets another answer, one in a crowd proves nothing about crowds.
        if result.record.name == STREAM or (unsteady and result.record.name != "repeat"):
            continue
        if causes and _proves_more(causes[0], result, mean):
            rest = tuple(cause for cause in causes[1:] if cause.found_by != SIZE_ONLY)
            own = tuple(msgspec.structs.replace(cause, gating=True) for cause in result.causes)
            causes = (*own, *rest)
            break
    reconciled = []
    for result in about_itself:
        if result.record.name == STREAM:
            reconciled.append(result)
            continue
        gap = float(result.record.evidence.get("mean", 0.0))
        consequence = bool(causes) and gap <= mean / COMPARABLE and result.causes[:1] != causes[:1]
        reconciled.append(
            _regated(result, gating=gap > gate and not consequence) if result.causes else result
        )
    return causes, reconciled


def by_samples_alone(fidelity: ProbeResult, engine: str) -> tuple[CauseFound, ...]:
    """Numbers are right, samples are not, and no account of the sampler says how."""
    if fidelity.record.status is not Outcome.FAIL:
        return ()
    return (found(sampling_cause(fidelity), engine, "sampling", fidelity.record.says),)


def decided_by_update(
    causes: tuple[CauseFound, ...], asked: Sequence[ProbeResult], is_right: Callable[[], bool], engine: str
) -> tuple[CauseFound, ...]:
    """The worst request `is_right` since the reference's own weights were pushed: other weights made it wrong.

    A path outlives the weights, so no cause of the path stands against that. A meaning does: what a sampler does may
    not show in the one request.
    """
    layers = {CAUSES[cause.cause].layer for cause in causes if cause.gating}
    pushed = any(each.record.name == "weight-sync" and each.record.status is Outcome.PASS for each in asked)
    if not pushed or not layers or not layers <= {Layer.PATH, Layer.NONE} or not is_right():
        return causes
    says = "pushing the reference's own weights made the difference go away: the engine ran others before"
    return (found("weights/stale", engine, "attribution", says),)


def _proves_more(cause: CauseFound, result: ProbeResult, mean: float) -> bool:
    """Whether a self-inconsistency names `cause`'s difference better than `cause` does."""
    evidence = result.record.evidence
    if not result.causes or float(evidence.get("mean", 0.0)) < COMPARABLE * mean:
        return False
    if cause.cause != "unexplained" and cause.found_by != SIZE_ONLY:
        return False
    if result.record.name == "prefill-decode":
        # Scores are never sampled nor processed: whatever is done to logits or numbers while decoding shows here, and
        # only what has the size of rounding is known to be the path's.
        return cause.found_by == SIZE_ONLY and bool(evidence.get("prefill_is_right"))
    if result.record.name == "batch":
        return bool(evidence.get("alone_is_right"))
    return cause.cause == "unexplained" or result.record.name == "repeat"


def _regated(result: ProbeResult, *, gating: bool) -> ProbeResult:
    causes = tuple(msgspec.structs.replace(cause, gating=gating) for cause in result.causes)
    status = Outcome.FAIL if gating else Outcome.PASS
    return ProbeResult(msgspec.structs.replace(result.record, status=status), causes)


def conclude(results: Sequence[ProbeResult], causes: Sequence[CauseFound]) -> Conclusion:
    """Order causes, and say in one sentence what was found."""
    results = _without_consequences(results, causes)
    by_probe = [(result.record.name, cause) for result in results for cause in result.causes]
    first = [cause for name, cause in by_probe if name == "contract"]
    rest = [cause for name, cause in by_probe if name != "contract"]
    unnamed = any(cause.cause == "unexplained" for cause in causes)
    # A broken contract comes first, but where Δ has no name it does not give it one.
    merged = _merged([*causes, *first, *rest] if unnamed else [*first, *causes, *rest])
    gating = [cause for cause in merged if cause.gating]
    failed = [r.record for r in results if r.record.status is Outcome.FAIL]
    unanswered = [r.record for r in results if r.record.required and r.record.status is Outcome.INCONCLUSIVE]
    if gating or failed:
        principal = gating[0] if gating else None
        guilty = "trainer" if principal is not None and principal.found_by == "trainer" else "engine"
        says = CAUSES[principal.cause].says if principal is not None else failed[0].says
        return Conclusion(Outcome.FAIL, guilty, says, merged)
    if unanswered:
        says = f"{unanswered[0].name}: {unanswered[0].says}"
        if any(each.cut_off for each in unanswered):
            says += "; what was answered is kept, and the run can be resumed"
        return Conclusion(Outcome.INCONCLUSIVE, "unknown", says, merged)
    says = "Engine and reference are the same policy, within the rounding that their precision allows."
    return Conclusion(Outcome.PASS, "none", says, merged)


def _without_consequences(results: Sequence[ProbeResult], causes: Sequence[CauseFound]) -> list[ProbeResult]:
    """Rewards differ because something else does: where that has a name they are evidence, and name nothing."""
    named = [*causes, *(cause for result in results for cause in result.causes)]
    if not any(cause.gating and cause.found_by not in OTHER_POLICIES for cause in named):
        return list(results)
    return [ProbeResult(result.record) if result.record.name == "rewards" else result for result in results]


def _merged(causes: Sequence[CauseFound]) -> tuple[CauseFound, ...]:
    """Each cause once, by its strongest evidence; gating ones first, in the order they were found.

    Another model before all: that it also runs over the reference's stop token is no fault of its own.
    """
    best: dict[str, CauseFound] = {}
    for cause in causes:
        known = best.get(cause.cause)
        if known is None or (cause.gating, cause.explained) > (known.gating, known.explained):
            best[cause.cause] = cause
    return tuple(sorted(best.values(), key=lambda cause: (not cause.gating, cause.cause != OTHER_MODEL)))
