"""Does the engine agree with itself? The same request, with one thing about its surroundings changed.

Each comparison runs over the tokens that both sides share before they first part ways, because a logprob after a
different token answers a different question. Any difference in bits is listed; it gates only where it is larger
than the audit's own gate.

What comes and goes falls on one side of a comparison by chance. So wherever two sides A and B differ beyond rounding both
are asked once more: a difference is the comparison's only if A is A and B is B again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import numpy as np

from zerodrift.audit.checked_calls import generated, scored
from zerodrift.audit.counterfactual.decoding import decoded_otherwise
from zerodrift.audit.counterfactual.packed import saw_each_other
from zerodrift.audit.probes.decoded import decoded_only, processed_alike
from zerodrift.audit.probes.result import UNSTEADY, ProbeResult, answered, found, not_judged, vacuous
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.errors import BadAnswer
from zerodrift.core.request import Prompt, Request
from zerodrift.core.task import Scorer
from zerodrift.drift.gates import Gates
from zerodrift.records.evidence import AgreementEvidence, UnseededEvidence
from zerodrift.records.verdict import Outcome, Probe
from zerodrift.stats.arrays import Floats

Sides = tuple[list[Completion], list[Completion]]
Pairs = Sequence[tuple[Floats, Floats]]
"""Logprobs of the same tokens, for each request."""
LEAST_SHARED = 0.5
"""Share of the tokens that two runs with the same seeds must have in common. Rounding parts ways at a token in some
hundreds; an engine that draws anew shares only what is nearly certain."""
LEAST_IN_COMPANY = 2
"""Requests that must differ in company twice over. Of six, with none of fifteen asked alone, chance does that to two in one
audit of 80,000 at most, however often it strikes; to one in 1,200."""


@dataclass(frozen=True)
class SelfConsistency:
    """The probes; what several of them compare with is asked for once."""

    engine: Backend
    reference: Scorer
    """Says which of two different answers is right."""
    requests: Sequence[Request]
    """At temperature 1 without truncation, where raw and processed logprobs are the same number."""
    gates: Gates
    salt: str
    """Kept out of other audits' caches by this."""

    @cached_property
    def alone(self) -> list[Completion]:
        """Every request by itself, with a cold cache where the engine can be told so."""
        return one_by_one(self.engine, self.cold("alone"))

    @cached_property
    def truth(self) -> list[Floats]:
        """What the reference makes of the sequences that came back alone: prompt and output, but the first token."""
        return scored(self.reference, [completion.sequence for completion in self.alone], "the reference")

    def repeat(self) -> ProbeResult:
        """Half of the requests, one at a time, once more."""
        if Capability.SEED not in self.engine.capabilities:
            return not_judged(Probe.REPEAT, "the engine takes no seed, so samples cannot be repeated")
        half = (len(self.requests) + 1) // 2
        once = self.alone[:half]
        again = one_by_one(self.engine, self.cold("again")[:half])
        return self._compare(Probe.REPEAT, UNSTEADY, (once, again))

    def batch(self) -> ProbeResult:
        """The same requests, one at a time and all together, with a cold cache both times."""
        if Capability.SEED not in self.engine.capabilities:
            return not_judged(Probe.BATCH, "the engine takes no seed, so samples cannot be repeated")
        answers = generated(self.engine, self.cold("together"))
        together = first_of([answer.completions for answer in answers])
        told = [np.array(completion.logprobs) for completion in self.alone]
        right = self._right(
            told, [row[len(row) - len(one) :] for row, one in zip(self.truth, told, strict=True)]
        )

        def again() -> Sides:
            more = generated(self.engine, self.cold("together-again"))
            return one_by_one(self.engine, self.cold("alone-again")), first_of([a.completions for a in more])

        sides = self.alone, together
        result = self._compare(Probe.BATCH, "path/batch-variance", sides, again, alone_is_right=right)
        return self._seeing_each_other(result, together) if right else result

    def _seeing_each_other(self, result: ProbeResult, together: Sequence[Completion]) -> ProbeResult:
        """A difference in company has a better name where prompts that see each other predict every number of it."""
        evidence, reference = result.evidence, self.reference
        if not isinstance(evidence, AgreementEvidence) or not isinstance(reference, ReferenceBackend):
            return result
        if evidence.changed or evidence.mean <= self.gates.mean:
            return result
        if not saw_each_other(reference.model, together, evidence.mean, self.gates.mean):
            return result
        message = f"{result.message}: together, prompts see those before them in the batch"
        named = found("path/mask", self.engine.name, result.probe, message, gating=True)
        evidence = msgspec.structs.replace(evidence, predicted=True)
        return msgspec.structs.replace(result, message=message, causes=(named,), evidence=evidence)

    def cache(self) -> ProbeResult:
        """The same long prompts with a cold and with a warm prefix cache."""
        needed = {Capability.SEED, Capability.CACHE_SALT, Capability.CACHED_TOKENS}
        if missing := needed - self.engine.capabilities:
            return not_judged(Probe.CACHE, f"the engine does not offer: {', '.join(sorted(missing))}")

        def twice(purpose: str) -> Sides:
            salted = self.cold(purpose)
            return one_by_one(self.engine, salted), one_by_one(self.engine, salted)

        cold, warm = twice("cache")
        hits = [completion.cached_tokens or 0 for completion in warm]
        if not any(hits) or any(completion.cached_tokens for completion in cold):
            return vacuous(Probe.CACHE, f"no prefix was served from the cache: {self._why_not_cached()}")
        again = partial(twice, "cache-again")
        return self._compare(Probe.CACHE, "path/prefix-cache", (cold, warm), again, cached_tokens=sum(hits))

    def _why_not_cached(self) -> str:
        """Settings say whether there is a cache at all."""
        said = self.engine.fingerprint().numeric.get("enable_prefix_caching")
        if said == "false":
            return "prefix caching is off (engine.enable_prefix_caching=true turns it on where the engine is started here)"
        longest = max(len(request.prompt.token_ids) for request in self.requests)
        on = "caching is on" if said == "true" else "the engine does not say whether it caches"
        return f"{on}, and prompts of up to {longest} tokens were not found again"

    def prefill_decode(self) -> ProbeResult:
        """Logprobs reported while decoding, and those of the same tokens as a prompt."""
        if Capability.SCORE not in self.engine.capabilities:
            return not_judged(Probe.PREFILL_DECODE, "the engine does not score given tokens")
        sequences = [completion.sequence for completion in self.alone]
        prefilled = scored(self.engine, sequences, self.engine.name)
        outputs = [
            scores[len(completion.prompt_token_ids) - 1 :]
            for completion, scores in zip(self.alone, prefilled, strict=True)
        ]
        pairs = [(np.array(one.logprobs), scores) for one, scores in zip(self.alone, outputs, strict=True)]
        right = self._right(prefilled, self.truth)
        only = decoded_only(pairs, self.gates)
        result = self.judge(
            Probe.PREFILL_DECODE, "path/prefill-decode", pairs, prefill_is_right=right, decoded_only=only
        )

        def repetitions() -> list[Pairs]:
            more = scored(self.engine, sequences, self.engine.name)
            scores = list(zip(prefilled, more, strict=True))
            if Capability.SEED not in self.engine.capabilities:
                return [scores]
            again = one_by_one(self.engine, self.cold("decoded-again"))
            return [scores, [common(*pair) for pair in zip(self.alone, again, strict=True)]]

        result = self.confirmed(result, repetitions)
        return self._of_decoding(result, outputs) if right and only else result

    def _of_decoding(self, result: ProbeResult, right: Sequence[Floats]) -> ProbeResult:
        """A difference of decoding has a better name where one predicts its numbers, and is none where logits are alike."""
        evidence, reference = result.evidence, self.reference
        if not isinstance(evidence, AgreementEvidence) or not isinstance(reference, ReferenceBackend):
            return result
        if evidence.changed != 0 or evidence.mean <= self.gates.mean:
            return result
        if (named := decoded_otherwise(reference.model, self.alone, right)) is not None:
            message = f"{result.message}: {named.message}, which explains {named.explained:.1%}"
            cause = found(
                named.cause, self.engine.name, result.probe, message, explained=named.explained, gating=True
            )
            evidence = msgspec.structs.replace(evidence, predicted=True)
            return msgspec.structs.replace(result, message=message, evidence=evidence, causes=(cause,))
        if processed_alike(self.engine, reference, self.cold("alternatives"), self.gates):
            evidence = msgspec.structs.replace(evidence, decoded_only=False)
        return msgspec.structs.replace(result, evidence=evidence)

    def _right(self, told: Sequence[Floats], truth: Sequence[Floats]) -> bool:
        gaps = np.concatenate([np.abs(one - other) for one, other in zip(told, truth, strict=True)])
        return bool(len(gaps) and gaps.mean() <= self.gates.mean)

    def cold(self, purpose: str) -> list[Request]:
        """The requests with salts that no request had before, where the engine knows salts."""
        if Capability.CACHE_SALT not in self.engine.capabilities:
            return list(self.requests)
        return [
            Request(
                Prompt(request.prompt.token_ids, request.prompt.text, f"{self.salt}-{purpose}-{number}"),
                request.sampling,
            )
            for number, request in enumerate(self.requests)
        ]

    def _compare(
        self, probe: Probe, cause: str, sides: Sides, again: Callable[[], Sides] | None = None, **more: int
    ) -> ProbeResult:
        pairs = _pairs(*sides)
        shared, drawn = sum(len(one) for one, _ in pairs), sum(len(one.token_ids) for one in sides[0])
        # Numbers that differ where tokens do not are a finding, however soon the tokens part.
        if shared < LEAST_SHARED * drawn and not any((one != other).any() for one, other in pairs):
            message = f"with the same seeds {drawn - shared} of {drawn} tokens came out otherwise: the engine ignores seeds"
            return vacuous(probe, message, UnseededEvidence(shared=shared, drawn=drawn))
        result = self.judge(probe, cause, pairs, **more)
        if again is None:
            return result
        later: list[Sides] = []

        def repetitions() -> list[Pairs]:
            later.append(again())
            return [_pairs(side, now) for side, now in zip(sides, later[0], strict=True)]

        confirmed = self.confirmed(result, repetitions)
        if probe is Probe.BATCH and later and self._company_alone(sides, later[0]):
            # Who meets whom in a server is not the same twice.
            return msgspec.structs.replace(result, evidence=confirmed.evidence)
        return confirmed

    def _company_alone(self, sides: Sides, later: Sides) -> bool:
        """Alone every request repeats itself, and in company the same ones differ from that again."""
        if any(self._changed(*pair) for pair in _pairs(sides[0], later[0])):
            return False
        both = zip(_pairs(*sides), _pairs(*later), strict=True)
        return sum(self._changed(*one) and self._changed(*two) for one, two in both) >= LEAST_IN_COMPANY

    def confirmed(self, result: ProbeResult, repetitions: Callable[[], Sequence[Pairs]]) -> ProbeResult:
        """The same finding where each side repeats itself; else what comes and goes, whatever was compared.

        `repetitions` pairs what each side said with what it says now.
        """
        evidence = result.evidence
        if (
            not result.causes
            or not isinstance(evidence, AgreementEvidence)
            or not self._beyond_rounding(evidence)
        ):
            return result
        asked = list(zip(*repetitions(), strict=True))
        changed = sum(any(self._changed(*pair) for pair in sides) for sides in asked)
        evidence = msgspec.structs.replace(evidence, changed=changed)
        if not changed:
            return msgspec.structs.replace(result, evidence=evidence)
        message = f"{result.message}; asked once more, {changed} of {len(asked)} requests got other numbers than before"
        (cause,) = result.causes
        named = found(
            UNSTEADY, self.engine.name, result.probe, message, explained=cause.explained, gating=cause.gating
        )
        return msgspec.structs.replace(result, message=message, evidence=evidence, causes=(named,))

    def _beyond_rounding(self, evidence: AgreementEvidence) -> bool:
        return evidence.mean > self.gates.mean or evidence.max > self.gates.outlier

    def _changed(self, one: Floats, other: Floats) -> bool:
        gaps = np.abs(one - other)
        return bool(len(gaps) and (gaps.mean() > self.gates.mean or gaps.max() > self.gates.outlier))

    def judge(self, probe: Probe, cause: str, pairs: Pairs, **more: int) -> ProbeResult:
        """Equal bits pass; other numbers are `cause`, which gates where they are further apart than the gate.

        `more` are further fields of the evidence.
        """
        gaps = np.abs(np.concatenate([one - other for one, other in pairs]))
        if len(gaps) == 0:
            return vacuous(probe, "the two runs share no token")
        differing = int((gaps > 0).sum())
        evidence = AgreementEvidence(
            tokens=len(gaps), differing=differing, mean=float(gaps.mean()), max=float(gaps.max())
        )
        evidence = msgspec.structs.replace(evidence, **more)
        if not differing:
            return answered(probe, Outcome.PASS, f"{len(gaps)} tokens, every bit equal", evidence)
        gating = float(gaps.mean()) > self.gates.mean
        message = (
            f"{differing} of {len(gaps)} tokens differ, by {gaps.mean():.2g} on average "
            f"and {gaps.max():.2g} at most"
        )
        share = differing / len(gaps)
        cause_found = found(cause, self.engine.name, probe, message, explained=share, gating=gating)
        status = Outcome.FAIL if gating else Outcome.PASS
        return answered(probe, status, message, evidence, causes=(cause_found,))


def one_by_one(engine: Backend, requests: Sequence[Request]) -> list[Completion]:
    """The answer to each request by itself."""
    return first_of([generated(engine, [request])[0].completions for request in requests])


def first_of(groups: Sequence[tuple[Completion, ...]]) -> list[Completion]:
    """The one sample that each request of these probes asks for."""
    if not all(groups):
        raise BadAnswer("the engine gave no usable sample for a request of this probe")
    return [completions[0] for completions in groups]


def _pairs(first: Sequence[Completion], second: Sequence[Completion]) -> Pairs:
    return [common(one, other) for one, other in zip(first, second, strict=True)]


def common(one: Completion, other: Completion) -> tuple[Floats, Floats]:
    """Logprobs of the tokens that both have before they part."""
    shared = _shared(one.token_ids, other.token_ids)
    return np.array(one.logprobs[:shared]), np.array(other.logprobs[:shared])


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens up to and including the first that differs share their context; the differing one is not shared."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))
