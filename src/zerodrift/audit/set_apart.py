"""Which findings of a probe are another's: one fault is found by whatever runs while it acts, and named once.

What company does is not what comes and goes, and scores that mean something else are no path. Torch-free.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from zerodrift.audit.probes.result import UNSTEADY, ProbeResult
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.records.evidence import AgreementEvidence, GapEvidence, ReturnEvidence
from zerodrift.records.verdict import CauseFound, Outcome, Probe

COMPARABLE = 0.3
"""Two differences within this factor of each other may be one."""
SERVED, COMPANY = "path/prefix-cache", "path/batch-variance"
LATER = frozenset({Probe.ENDS, Probe.PARAMETERS, Probe.MIXED, Probe.PREFILL_DECODE})


def company_apart(
    results: Sequence[ProbeResult], gate: float, explanations: Sequence[CauseFound] = ()
) -> tuple[ProbeResult, ...]:
    """What is otherwise at the end of an audit came in other company, where company is known to make as much of a
    difference: an engine that repeats itself alone is not one whose numbers come and go."""
    known = [each for each in results if _by_company(each) and gap(each) > gate]
    alone_repeats = not any(each.probe is Probe.REPEAT and each.causes for each in results)
    most = max((largest(each) for each in known), default=0.0)
    if any(each.cause == COMPANY and each.gating for each in explanations):
        # Wrong in company twice, and right alone as often.
        most = inf
    why = "but so are requests in company from those alone, and company is not the same twice"
    return tuple(
        _anothers(each, why)
        if isinstance(each.evidence, ReturnEvidence)
        and each.causes
        and alone_repeats
        and largest(each) <= most / COMPARABLE
        else each
        for each in results
    )


def _by_company(result: ProbeResult) -> bool:
    """Requests in company differ from what they are alone, which is right, and did so twice."""
    evidence = result.evidence
    return (
        result.probe is Probe.BATCH
        and isinstance(evidence, AgreementEvidence)
        and bool(evidence.alone_is_right and result.causes)
        and evidence.changed is not None
        and not unsteady(result)
    )


def cache_apart(
    results: Sequence[ProbeResult], explanations: Sequence[CauseFound] = ()
) -> tuple[ProbeResult, ...]:
    """What is off in requests that hit the prefix cache alone, or in prompts long enough to, is the cache's, where that is
    wrong by itself twice and nothing else is: entries that are made worse whenever they are read come and go too. So is what
    comes and goes where another prompt's prefix explains numbers: who was served first is not the same twice."""
    others = any(each.probe in (Probe.REPEAT, Probe.BATCH) and each.causes for each in results)
    wrong = not others and any(_by_cache(each) for each in results)
    served = not others and any(each.cause == SERVED and each.gating for each in explanations)
    return tuple(
        _anothers(each, "which is the prefix cache's, and found there")
        if isinstance(each.evidence, ReturnEvidence)
        and ((served and each.causes) or (wrong and _may_be_cached(each.evidence)))
        else each
        for each in results
    )


def _by_cache(result: ProbeResult) -> bool:
    """Cached prefixes differ from cold ones, and did so twice alike."""
    evidence = result.evidence
    return (
        result.probe is Probe.CACHE
        and isinstance(evidence, AgreementEvidence)
        and bool(result.causes)
        and evidence.changed == 0
        and not unsteady(result)
    )


def _anothers(result: ProbeResult, why: str) -> ProbeResult:
    """A finding that is another probe's names nothing here."""
    message = f"{result.message}; {why}"
    return msgspec.structs.replace(result, status=Outcome.PASS, causes=(), message=message)


def _may_be_cached(evidence: ReturnEvidence) -> bool:
    return bool(evidence.cached_only) or evidence.prompts_from is not None


def later_apart(results: Sequence[ProbeResult], *, parity_is_right: bool) -> tuple[ProbeResult, ...]:
    """What is asked when the audit's own numbers were taken shows whatever began since: where these are right and answers
    at the end are not, a parameter that was asked for in between is not what is wrong, nor is decoding."""
    began = any(isinstance(each.evidence, ReturnEvidence) and each.causes for each in results)
    since = began and parity_is_right
    return tuple(_listed(each) if since and each.probe in LATER else each for each in results)


def scores_apart(
    results: Sequence[ProbeResult], explanations: Sequence[CauseFound], *, parity_is_right: bool
) -> tuple[ProbeResult, ...]:
    """Where scores of given tokens mean something else and decoding is right, the two differ because of that.

    Where decoding is wrong too, the same meaning of both is rather the model's: scores are neither sampled nor processed.
    """
    given = next((each for each in results if each.probe is Probe.GIVEN_TOKENS and each.causes), None)
    if given is None:
        return tuple(results)
    named = {cause.cause for cause in explanations if cause.gating}
    decoding_is_right = parity_is_right and not named
    another_meaning = bool(named) and not named & {UNEXPLAINED, *(cause.cause for cause in given.causes)}
    if not decoding_is_right and not another_meaning:
        return tuple(msgspec.structs.replace(each, causes=()) if each is given else each for each in results)
    return tuple(_listed(each) if each.probe is Probe.PREFILL_DECODE else each for each in results)


def _listed(result: ProbeResult) -> ProbeResult:
    """The same finding as a consequence of something else."""
    own = tuple(msgspec.structs.replace(cause, gating=False) for cause in result.causes)
    status = Outcome.PASS if own else result.status
    return msgspec.structs.replace(result, causes=own, status=status)


def largest(result: ProbeResult) -> float:
    """The largest difference of a token."""
    return result.evidence.max if isinstance(result.evidence, AgreementEvidence) else 0.0


def gap(result: ProbeResult) -> float:
    """By how much the engine disagrees with itself, or with the reference about given tokens."""
    return result.evidence.mean if isinstance(result.evidence, AgreementEvidence | GapEvidence) else 0.0


def unsteady(result: ProbeResult) -> bool:
    return any(cause.cause == UNSTEADY for cause in result.causes)
