"""Are the requests of an audit answered at its end as they were before?

What comes and goes (one request in twenty, one token in fifty, from some second on) hits whichever comparison runs when
it acts, and looks like a fault of that. So the first requests are asked again when everything else was asked, and
requests with outliers of Δ are asked again in the company they had: a cause that is always there is there again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from zerodrift.audit.checked_calls import generated
from zerodrift.audit.measure import Measurement
from zerodrift.audit.observe import BATCH
from zerodrift.audit.outliers import correlates, provenance, sparse
from zerodrift.audit.probes.consistency import common
from zerodrift.audit.probes.result import UNSTEADY, ProbeResult, answered, found, not_judged, vacuous
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt, Request
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.evidence import ReturnEvidence
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import CauseFound, Outcome, Probe
from zerodrift.stats.arrays import Bools, Floats, Ids

FIRST = 6
FAR = 3
"""Gates of the mean by which a whole answer must have changed. Two roundings of one answer are apart by 1.4 floors, and a
gate is two of them at least."""
MOST_BLOCKS = 2
"""Calls of the plan that are repeated whole, those with most outliers: what is wrong in company must be in company."""
Answers = dict[tuple[int, int], Completion]
"""By number of the request and of the sample."""


class Compared(msgspec.Struct, frozen=True):
    """One sample, then and now."""

    request: int
    gaps: Floats
    """|difference| of the tokens that both have before they part."""
    changed: bool
    """Some number is another one, beyond rounding."""
    parted: bool


@dataclass(frozen=True, kw_only=True)
class IntermittentProbe:
    """What was asked and answered, and by what it is judged."""

    engine: Backend
    reference: ReferenceBackend
    plan: Sequence[Request]
    rollouts: Sequence[Rollout]
    """Those with a completion, in the order of `measurements`."""
    measurements: Sequence[Measurement]
    table: TokenTable
    floor: Floor
    gates: Gates
    failed: bool
    """Parity did: only then are there outliers to ask about."""
    salt: str

    def ask(self) -> ProbeResult:
        """The first requests, then those with outliers."""
        if Capability.SEED not in self.engine.capabilities:
            return not_judged(Probe.RETURN, "the engine takes no seed, so samples cannot be repeated")
        first = range(min(FIRST, len(self.plan)))
        look = self._asked(first, "first")
        compared = self._compared(self._then, look)
        blocks = self._blocks
        came: set[int] = set()
        if any(each.changed for each in compared):
            # In smaller company than before: what that alone does, it does again.
            again = self._compared(look, self._asked(first, "first-again"))
            came = {each.request for each in again if each.changed}
            blocks = sorted({0, *blocks})
        for block in blocks:
            numbers = range(block * BATCH, min((block + 1) * BATCH, len(self.plan)))
            if block == 0:
                compared = []
            compared += self._compared(self._then, self._asked(numbers, f"block-{block}"))
        return self._judged(compared, came)

    def _judged(self, compared: Sequence[Compared], came: set[int]) -> ProbeResult:
        others = [each for each in compared if each.request not in self._wrong]
        if not compared:
            return vacuous(
                Probe.RETURN,
                "asked again, no request met the prefix cache as it did at first, and the engine takes no cache salt",
            )
        if 2 * sum(each.parted for each in others) > len(others) > 0:
            return vacuous(
                Probe.RETURN, "with the same seeds tokens come out otherwise: the engine ignores seeds"
            )
        evidence = self._evidence(compared, came)
        status = Outcome.PASS
        message = f"{evidence.tokens} tokens of {len(compared)} answers are what they were at the beginning"
        if evidence.asked_again:
            message = f"{evidence.asked_again - evidence.gone} of {evidence.asked_again} requests with outliers were answered as before"
        causes: tuple[CauseFound, ...] = ()
        if evidence.comes_and_goes:
            evidence = self._with_particulars(evidence)
            status, message = Outcome.FAIL, in_words(evidence)
            causes = (
                found(
                    UNSTEADY,
                    self.engine.name,
                    Probe.RETURN,
                    message,
                    explained=evidence.explained,
                    gating=True,
                ),
            )
        return answered(Probe.RETURN, status, message, evidence, causes=causes)

    def _evidence(self, compared: Sequence[Compared], came: set[int]) -> ReturnEvidence:
        gaps = np.concatenate([each.gaps for each in compared])
        wrong, size = self._wrong, np.abs(np.nan_to_num(self.table.delta, posinf=0.0, neginf=0.0))
        rest = size[~self._outlier]
        asked = {each.request for each in compared if each.request in wrong}
        # Tokens part by rounding too; where nobody else's do, it is no rounding.
        steady = not any(each.parted for each in compared if each.request not in wrong)
        gone = {
            each.request
            for each in compared
            if each.request in wrong and (each.changed or (each.parted and steady))
        }
        came |= {each.request for each in compared if each.request not in wrong and each.changed}
        return ReturnEvidence(
            tokens=len(gaps),
            differing=int((gaps > 0).sum()),
            mean=float(gaps.mean()) if len(gaps) else 0.0,
            max=float(gaps.max()) if len(gaps) else 0.0,
            outliers=int(self._outlier.sum()),
            outlier_requests=len(wrong),
            requests=len({rollout.index for rollout in self.rollouts}),
            asked_again=len(asked),
            gone=len(gone),
            came=len(came),
            rest_is_right=bool(len(rest) and rest.mean() <= self.gates.mean),
            explained=float(size[self._outlier].sum() / max(size.sum(), 1e-300)),
        )

    def _with_particulars(self, evidence: ReturnEvidence) -> ReturnEvidence:
        """Whose values, since when and on which requests."""
        if not self._outlier.any():
            return evidence
        facts, teacher = self.reference.facts, self.reference.teacher
        values = provenance(
            teacher, self.measurements, self.table, self._outlier, self.floor, facts.eos_token_ids
        )
        where = correlates(self.measurements, self._request_of, self.table, self._outlier)
        return msgspec.structs.replace(evidence, **values._asdict(), **where._asdict())

    @cached_property
    def _outlier(self) -> Bools:
        """Tokens that are wrong by themselves; none where nearly all are."""
        outlier: Bools = ~(np.abs(self.table.delta) <= self.gates.unlike_rounding)
        few = self.failed and sparse(outlier, self.table.sequence)
        return outlier if few else np.zeros_like(outlier)

    @cached_property
    def _request_of(self) -> Ids:
        return np.array([rollout.index for rollout in self.rollouts])

    @cached_property
    def _wrong(self) -> set[int]:
        """Requests with an outlier."""
        return set(self._request_of[np.unique(self.table.sequence[self._outlier])].tolist())

    @property
    def _blocks(self) -> list[int]:
        wrong = [request // BATCH for request in self._wrong]
        return sorted(sorted(set(wrong), key=wrong.count, reverse=True)[:MOST_BLOCKS])

    @cached_property
    def _then(self) -> Answers:
        return {
            (rollout.index, rollout.completion.sample_index): rollout.completion
            for rollout in self.rollouts
            if rollout.completion is not None
        }

    def _asked(self, numbers: range, purpose: str) -> Answers:
        requests = [self._cold(self.plan[number], purpose) for number in numbers]
        answers = zip(numbers, generated(self.engine, requests), strict=True)
        return {
            (number, each.sample_index): each for number, answer in answers for each in answer.completions
        }

    def _cold(self, request: Request, purpose: str) -> Request:
        """Not served from what it left in the cache itself; one salt, so that equal prompts may share as they did."""
        if Capability.CACHE_SALT not in self.engine.capabilities:
            return request
        prompt = request.prompt
        return Request(Prompt(prompt.token_ids, prompt.text, f"{self.salt}-{purpose}"), request.sampling)

    def _compared(self, then: Answers, now: Answers) -> list[Compared]:
        """Samples that came both times, and both times with a hit of the prefix cache or both times without."""
        pairs = ((key[0], then[key], now[key]) for key in now if key in then)
        return [
            self._pair(request, one, other)
            for request, one, other in pairs
            if bool(one.cached_tokens) is bool(other.cached_tokens)
        ]

    def _pair(self, request: int, one: Completion, other: Completion) -> Compared:
        gaps = np.abs(np.subtract(*common(one, other)))
        # Two healthy answers in bf16 differ by their rounding, and what differs here fails an audit.
        far = len(gaps) and (gaps.max() > self.gates.unlike_rounding or gaps.mean() > FAR * self.gates.mean)
        return Compared(request, gaps, bool(far), one.token_ids != other.token_ids)


def in_words(evidence: ReturnEvidence) -> str:
    """What comes and goes, how often, and what it goes with."""
    if not evidence.outliers:
        return f"{evidence.came} requests are answered otherwise than at the beginning, beyond rounding"
    told = [
        f"{evidence.outliers} tokens of {evidence.outlier_requests} of {evidence.requests} requests are off",
        f"asked again, {evidence.gone} of {evidence.asked_again} were answered otherwise",
    ]
    if evidence.came:
        told.append(f"{evidence.came} others were answered otherwise then")
    for count, whose in (
        (evidence.another_entry, "another token's in the same distribution"),
        (evidence.another_position, "another token's of the same output"),
        (evidence.another_request, "another request's"),
    ):
        if count is not None:
            told.append(f"of {count} in {evidence.looked_at} the value is {whose}")
    for edge, where in (
        (evidence.since_request, "from request {} on"),
        (evidence.until_request, "up to request {}"),
        (evidence.prompts_from, "with prompts of {} tokens and more"),
        (evidence.prompts_to, "with prompts of up to {} tokens"),
        (evidence.outputs_from, "from output token {} on"),
    ):
        if edge is not None:
            told.append("only " + where.format(edge))
    if evidence.cached_only:
        told.append("only with a hit of the prefix cache")
    return "comes and goes: " + "; ".join(told)
