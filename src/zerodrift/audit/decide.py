"""One decision from all answers: which side is wrong, why, and what to type.

PASS needs every required probe answered and no gating cause. A probe that could not run, or whose premise did not hold,
makes a required question INCONCLUSIVE; an optional one is listed as not judged. Causes come from explanations of Δ and
from probes, and are ordered, merged and gated here alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from zerodrift.audit.probes.result import ProbeResult, found, with_fix
from zerodrift.audit.set_apart import (
    COMPARABLE,
    cache_apart,
    company_apart,
    gap,
    later_apart,
    scores_apart,
    unsteady,
)
from zerodrift.core.cause import CAUSES, UNEXPLAINED, Expected, Layer
from zerodrift.records.evidence import AgreementEvidence, ReturnEvidence
from zerodrift.records.verdict import CauseFound, FoundBy, Outcome, Probe

TINY = 0.1
"""What is so much smaller than Δ is not where Δ comes from."""
SAME_POLICY = "Engine and reference are the same policy, within the rounding that their precision allows."
Causes = tuple[CauseFound, ...]


class Decision(NamedTuple):
    """The verdict, its causes with the principal first, and the answers as they count."""

    verdict: Outcome
    guilty: str
    message: str
    causes: Causes
    results: tuple[ProbeResult, ...]
    unstated: tuple[str, ...] = ()
    """Parameters that nobody stated, and under which nothing would be wrong."""

    @property
    def principal(self) -> CauseFound | None:
        """The first cause that gates."""
        return next((cause for cause in self.causes if cause.gating), None)


class Circumstances(NamedTuple):
    """What the same answers mean depends on these."""

    mean: float = 0.0
    """Mean |Δ| from the reference; infinite where none could be compared."""
    gate: float = 0.0
    engine: str = ""
    """Whose words fixes are in."""
    settings: Mapping[str, str] = {}
    """In force there, as its fingerprint shows them."""
    right_again: Callable[[], bool] = lambda: False
    """Whether the worst request is answered rightly now; asked only where that decides."""
    unstated: Sequence[str] = ()
    """Sampling parameters that a dump leaves open, where one of them may be all that is wrong."""
    in_force: Collection[str] = ()
    """Those that explain numbers or samples."""
    odd_reference: bool = False
    """Engine and trainer agree with each other and not with the reference, and nothing explains both."""
    required: Sequence[Probe] = (Probe.PARITY, Probe.SAMPLING)
    """Probes without which there is no PASS, asked or not: nothing can be said of an engine without these two."""


def decide(
    results: Sequence[ProbeResult], explanations: Sequence[CauseFound], about: Circumstances
) -> Decision:
    """Answers and explanations of Δ to one decision."""
    right = about.mean <= about.gate
    results = cache_apart(company_apart(results, about.gate, explanations), explanations)
    results = later_apart(results, parity_is_right=right)
    results = scores_apart(results, explanations, parity_is_right=right)
    # What is named by its size alone yields to a better name first, and is refuted where there is none.
    causes = _without_refuted(tuple(explanations), results, about, by_size=False)
    causes = _renamed(causes, [each for each in results if _of_itself(each)], about)
    causes = _without_refuted(causes, results, about, by_size=True)
    results = tuple(_regated(each, causes, about) if _of_itself(each) else each for each in results)
    causes = _by_update(causes, results, about)
    merged = _as_typed(_with_a_line(_merged(causes, results), results, about), about)
    if any(cause.gating for cause in merged) or any(each.status is Outcome.FAIL for each in results):
        return _failed(merged, results, about)
    waiting = [each for each in results if each.required and each.status is Outcome.INCONCLUSIVE]
    if waiting:
        message = f"{waiting[0].probe}: {waiting[0].message}"
        if any(each.cut_off for each in waiting):
            message += "; what was answered is kept, and the run can be resumed"
        return Decision(Outcome.INCONCLUSIVE, "unknown", message, merged, results)
    asked = {each.probe for each in results}
    if missing := [probe for probe in about.required if probe not in asked]:
        message = f"{', '.join(missing)}: not asked, and nothing passes without"
        return Decision(Outcome.INCONCLUSIVE, "unknown", message, merged, results)
    return Decision(Outcome.PASS, "none", SAME_POLICY, merged, results)


def _failed(causes: Causes, results: tuple[ProbeResult, ...], about: Circumstances) -> Decision:
    """Something is wrong; whether it can be blamed on a side depends on what is known."""
    gating = [cause for cause in causes if cause.gating]
    if names := _may_be_requested(gating, about):
        # With its fix it would read as a fault of the engine, which it may not be.
        listed = tuple(msgspec.structs.replace(cause, gating=False) for cause in causes)
        return Decision(Outcome.INCONCLUSIVE, "unknown", gating[0].evidence, listed, results, names)
    guilty = "trainer" if gating[0].found_by == Probe.TRAINER else "engine"
    message = CAUSES[gating[0].cause].message
    if gating[0].found_by == Probe.GIVEN_TOKENS and gating[0].cause != UNEXPLAINED:
        # Sentences about meaning are about what is sampled.
        message = f"Numbers are wrong {gating[0].evidence}"
    if guilty == "trainer" and CAUSES[gating[0].cause].layer is Layer.SEMANTIC:
        # Sentences about meaning are about engines.
        message = f"In the trainer's numbers {gating[0].evidence}"
    if gating[0].retells_probe:
        # That it fits no cause is what its line says.
        message = gating[0].evidence
    if about.odd_reference:
        return Decision(Outcome.INCONCLUSIVE, "unknown", message, causes, results)
    return Decision(Outcome.FAIL, guilty, message, causes, results)


def _without_refuted(
    causes: Causes, results: Sequence[ProbeResult], about: Circumstances, *, by_size: bool
) -> Causes:
    """A name is taken away where a probe finds what it rules out and no other name accounts for that.

    Logits that are scaled inside the model look like a temperature, but prompt scores carry no temperature.
    """
    named = [cause for cause in causes if cause.gating and cause.cause != UNEXPLAINED]
    # What a probe found in company, or behind a cached prefix, it found there alone.
    asked = [cause for cause in named if (cause.found_by == FoundBy.SIZE) is by_size]
    refuted = {cause.cause: against for cause in asked if (against := _against(cause, named, results, about))}
    if not refuted:
        return causes
    kept = tuple(cause for cause in causes if cause.cause not in refuted)
    listed = tuple(
        msgspec.structs.replace(
            cause, gating=False, evidence=f"{cause.evidence}; refuted: {refuted[cause.cause]}"
        )
        for cause in causes
        if cause.cause in refuted
    )
    if any(cause.gating for cause in kept):
        return (*kept, *listed)
    why = "; ".join(f"{name} fits Δ, but {against}" for name, against in refuted.items())
    unnamed = found(UNEXPLAINED, about.engine, FoundBy.VALUE, why, explained=0.0, interval=(0.0, 0.0))
    return (unnamed, *kept, *listed)


def _against(
    cause: CauseFound, named: Sequence[CauseFound], results: Sequence[ProbeResult], about: Circumstances
) -> str:
    """Which probe speaks against `cause`; empty where none does."""
    for probe, expected in CAUSES[cause.cause].predicts.items():
        others = [CAUSES[other.cause].predicts.get(probe) for other in named if other is not cause]
        # What comes and goes says nothing about what was compared.
        for result in (each for each in results if each.probe == probe and not unsteady(each)):
            if result.probe is Probe.GIVEN_TOKENS and result.causes:
                # Its scores are wrong for a reason of their own.
                continue
            # Only a difference of the same size is the same difference.
            large = gap(result) >= COMPARABLE * about.mean
            if expected is Expected.CLEAN and result.status is Outcome.FAIL and large:
                if all(other is Expected.CLEAN for other in others):
                    return f"{probe}, which it does not reach, fails ({result.message})"
            elif (
                expected is Expected.OFF and result.status is Outcome.PASS and gap(result) < TINY * about.mean
            ):
                return f"{probe}, where it must show, is right ({result.message})"
    return ""


def _with_a_line(causes: Causes, results: Sequence[ProbeResult], about: Circumstances) -> Causes:
    """A FAIL has a cause: one that nothing names is unexplained."""
    failed = next((each for each in results if each.status is Outcome.FAIL), None)
    if failed is None or any(cause.gating for cause in causes):
        return causes
    line = found(UNEXPLAINED, about.engine, failed.probe, failed.message, explained=0.0, interval=(0.0, 0.0))
    line = msgspec.structs.replace(line, retells_probe=True)
    return (line, *(cause for cause in causes if cause.cause != UNEXPLAINED))


def _as_typed(causes: Causes, about: Circumstances) -> Causes:
    """What is in force already is not told as a fix."""
    return tuple(
        with_fix(cause, f"{already} is in force already: {CAUSES[UNEXPLAINED].fix(about.engine)}")
        if not cause.particular_fix and (already := CAUSES[cause.cause].already(about.engine, about.settings))
        else cause
        for cause in causes
    )


def open_to_doubt(cause: CauseFound, unstated: Sequence[str], in_force: Collection[str] = ()) -> list[str]:
    """Those of the `unstated` parameters that a sound engine would show the same for, had they been requested.

    Where it is known which are in force, the others are not what was left out.
    """
    names = CAUSES[cause.cause].unless_requested
    known = [name for name in names if name in in_force]
    return [name for name in known or names if name in unstated]


def _may_be_requested(gating: Sequence[CauseFound], about: Circumstances) -> tuple[str, ...]:
    """Parameters without which nothing is a fault; none where something is one whatever was requested."""
    doubts = [open_to_doubt(cause, about.unstated, about.in_force) for cause in gating]
    return tuple(dict.fromkeys(name for names in doubts for name in names)) if doubts and all(doubts) else ()


def _of_itself(result: ProbeResult) -> bool:
    return result.probe.about_engine_itself


def _renamed(causes: Causes, about_itself: Sequence[ProbeResult], about: Circumstances) -> Causes:
    """A difference without a name, or named by its size alone, takes that of a self-inconsistency which is as large and
    proves more. What only a stream does is none: answers are compared that came whole."""
    for result in about_itself:
        evidence = result.evidence
        if isinstance(evidence, ReturnEvidence) and result.causes and evidence.outliers:
            return _come_and_gone(causes, result, evidence)
    noise = any(unsteady(each) and gap(each) > about.gate for each in about_itself)
    for result in about_itself:
        # Where the same question gets another answer, one in a crowd proves nothing about crowds.
        if noise and not unsteady(result):
            continue
        if causes and _proves_more(causes[0], result, about.mean) and _fits(causes[0], result):
            located = causes[0].located if result.probe is Probe.PREFILL_DECODE else ()
            own = tuple(
                msgspec.structs.replace(cause, gating=True, located=located) for cause in result.causes
            )
            return (*own, *(cause for cause in causes[1:] if cause.found_by != FoundBy.SIZE))
    return causes


def _come_and_gone(causes: Causes, result: ProbeResult, evidence: ReturnEvidence) -> Causes:
    """What was wrong was right when it was asked again: nothing that is always there explains that.

    Where Δ is within the gates without it there is nothing else to explain, and other names are hints.
    """
    others = tuple(cause for cause in causes if cause.cause != UNEXPLAINED)
    if evidence.rest_is_right:
        others = tuple(msgspec.structs.replace(cause, gating=False) for cause in others)
        return (*result.causes, *others)
    return (*causes, *result.causes)


def _proves_more(cause: CauseFound, result: ProbeResult, mean: float) -> bool:
    """Whether a self-inconsistency names `cause`'s difference better than `cause` does."""
    evidence = result.evidence
    if not isinstance(evidence, AgreementEvidence) or not result.causes:
        return False
    # Six requests in company may differ by less than all of them did; where every number is predicted that is no doubt.
    if not evidence.predicted and gap(result) < COMPARABLE * mean:
        return False
    unnamed, by_size = cause.cause == UNEXPLAINED, cause.found_by == FoundBy.SIZE
    if unsteady(result):
        return unnamed or by_size
    if result.probe is Probe.PREFILL_DECODE:
        # Scores are never sampled nor processed: whatever is done to logits or numbers while decoding shows here. The
        # path's is what has the size of rounding, and what spares the tokens that a prefill computed.
        return (by_size or (unnamed and bool(evidence.decoded_only))) and bool(evidence.prefill_is_right)
    if result.probe is Probe.BATCH:
        return (unnamed or by_size) and bool(evidence.alone_is_right)
    return unnamed


def _fits(cause: CauseFound, result: ProbeResult) -> bool:
    """Whether the names of a self-inconsistency may take the place of `cause`. A place in the model was turned for real and
    brought Δ to the floor: it is given up only for a name that predicts what the model itself would show, and kept beside
    that of decoding, where the same model scores rightly."""
    if result.probe is Probe.PREFILL_DECODE:
        return True
    return not cause.located or all(
        CAUSES[each.cause].predicts.get(Probe.GIVEN_TOKENS) is Expected.OFF for each in result.causes
    )


def _regated(result: ProbeResult, causes: Causes, about: Circumstances) -> ProbeResult:
    """Where Δ has a better name, self-inconsistencies no larger than it are consequences, and only listed."""
    if not result.causes or isinstance(result.evidence, ReturnEvidence):
        return result
    if causes and causes[0].found_by == result.probe:
        # It is the name.
        return result
    consequence = bool(causes) and gap(result) <= about.mean / COMPARABLE
    # What is done to numbers of decoded tokens shows in any size beside scores, which it does not reach.
    consequence |= bool(causes) and _reported_otherwise(result)
    # Whatever runs while it acts shows what comes and goes.
    consequence |= any(cause.found_by == Probe.RETURN for cause in causes) and not unsteady(result)
    # What was set apart before is a consequence already.
    gating = gap(result) > about.gate and not consequence and any(cause.gating for cause in result.causes)
    own = tuple(msgspec.structs.replace(cause, gating=gating) for cause in result.causes)
    return msgspec.structs.replace(result, causes=own, status=Outcome.FAIL if gating else Outcome.PASS)


def _reported_otherwise(result: ProbeResult) -> bool:
    """Scores are right, and first tokens, whose logits are a prefill's too, are not."""
    evidence = result.evidence
    return (
        result.probe is Probe.PREFILL_DECODE
        and isinstance(evidence, AgreementEvidence)
        and bool(evidence.prefill_is_right)
        and evidence.decoded_only is False
    )


def _by_update(causes: Causes, results: Sequence[ProbeResult], about: Circumstances) -> Causes:
    """The worst request is right since the reference's own weights were pushed: other weights made it wrong.

    A path outlives the weights, so no cause of the path stands against that. A meaning does: what a sampler does may
    not show in the one request.
    """
    layers = {CAUSES[cause.cause].layer for cause in causes if cause.gating}
    pushed = any(each.probe is Probe.WEIGHT_SYNC and each.status is Outcome.PASS for each in results)
    if not pushed or not layers or not layers <= {Layer.PATH, Layer.NONE} or not about.right_again():
        return causes
    message = "pushing the reference's own weights made the difference go away: the engine ran others before"
    return (found("weights/stale", about.engine, FoundBy.VALUE, message),)


def _merged(causes: Causes, results: Sequence[ProbeResult]) -> Causes:
    """Each cause once, by its strongest evidence; gating ones first, in the order they were found."""
    by_probe = [(result.probe, cause) for result in results for cause in result.causes]
    known = [*causes, *(cause for _, cause in by_probe)]
    if any(cause.gating and _of_the_rollouts(cause) for cause in known):
        # Rewards differ because something else does: where that has a name they are evidence, and name nothing.
        by_probe = [(probe, cause) for probe, cause in by_probe if probe is not Probe.REWARDS]
    first = [cause for probe, cause in by_probe if probe is Probe.CONTRACT]
    rest = [cause for probe, cause in by_probe if probe is not Probe.CONTRACT]
    # A broken contract comes first, but where Δ has no name it does not give it one.
    unnamed = any(cause.cause == UNEXPLAINED for cause in causes)
    best: dict[str, CauseFound] = {}
    for cause in [*causes, *first, *rest] if unnamed else [*first, *causes, *rest]:
        other = best.get(cause.cause)
        if other is None or (cause.gating, cause.explained) > (other.gating, other.explained):
            best[cause.cause] = cause
    return tuple(sorted(best.values(), key=lambda each: (not each.gating, not CAUSES[each.cause].outranks)))


def _of_the_rollouts(cause: CauseFound) -> bool:
    """Whether it may explain the rollouts whose rewards were compared."""
    return cause.found_by in set(FoundBy) or Probe(cause.found_by).of_the_rollouts
