"""Is what an engine streams what it answers whole?

Trainers that stream put token ids and logprobs together from pieces, and servers have lost, repeated, merged and
shifted them there. The same request is asked both ways, alone and with a cold cache: nothing else is different, so a
difference that the engine does not have with itself is the stream's.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from zerodrift.audit.checked_calls import streamed
from zerodrift.audit.probes.consistency import (
    LEAST_SHARED,
    Pairs,
    SelfConsistency,
    common,
    first_of,
    one_by_one,
)
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged, vacuous
from zerodrift.backends.base import Capability
from zerodrift.core.completion import Answer, Completion, FinishReason
from zerodrift.core.errors import BadAnswer
from zerodrift.records.evidence import AgreementEvidence, Evidence, StreamEvidence
from zerodrift.records.verdict import Outcome, Probe

CAUSE = "semantic/streaming"


def stream(itself: SelfConsistency) -> ProbeResult:
    """The same requests, whole and streamed."""
    if missing := {Capability.SEED, Capability.STREAM} - itself.engine.capabilities:
        return not_judged(Probe.STREAM, f"the engine does not offer: {', '.join(sorted(missing))}")
    whole = itself.alone
    try:
        answers = [streamed(itself.engine, [request])[0] for request in itself.cold("stream")]
    except BadAnswer as error:
        # The same engine answered the same requests whole: what cannot be read is the stream's own.
        return _failed(itself, str(error), StreamEvidence(requests=len(whole)))
    pieces = sum(answer.stream_deltas for answer in answers)
    evidence = StreamEvidence(requests=len(whole), pieces=pieces)
    broken = [message for one, other in zip(whole, answers, strict=True) if (message := _broken(one, other))]
    if broken:
        message = f"{len(broken)} of {len(whole)} answers are broken where they are streamed: {broken[0]}"
        return _failed(itself, message, evidence, len(broken) / len(whole))
    if all(answer.stream_deltas < 2 for answer in answers):
        return vacuous(Probe.STREAM, "every answer came in one piece, so nothing was put together", evidence)
    return _alike(itself, first_of([answer.completions for answer in answers]), evidence)


def _alike(itself: SelfConsistency, pieced: Sequence[Completion], evidence: StreamEvidence) -> ProbeResult:
    """Tokens and numbers, where the engine repeats itself at all: else a stream is one more repetition."""
    whole = itself.alone
    pairs = [common(one, other) for one, other in zip(whole, pieced, strict=True)]
    parted = sum(one.token_ids != other.token_ids for one, other in zip(whole, pieced, strict=True))
    parting = msgspec.structs.replace(evidence, parted=parted)
    again: list[Completion] = []

    def repetitions() -> list[Pairs]:
        again.extend(one_by_one(itself.engine, itself.cold("whole-again")))
        more = [streamed(itself.engine, [request])[0] for request in itself.cold("stream-again")]
        sides = (whole, again), (pieced, first_of([answer.completions for answer in more]))
        return [[common(*pair) for pair in zip(*side, strict=True)] for side in sides]

    result = itself.confirmed(itself.judge(Probe.STREAM, CAUSE, pairs), repetitions)
    status = result.status
    told = msgspec.structs.replace(
        result,
        message=f"{result.message}, in {evidence.pieces} pieces",
        evidence=_with_numbers(parting, result.evidence),
    )
    if not parted and (status is Outcome.PASS or again):
        return told
    again = again or one_by_one(itself.engine, itself.cold("whole-again"))
    if parted and all(_same(one, other) for one, other in zip(whole, again, strict=True)):
        message = f"{parted} of {len(whole)} answers have other tokens where they are streamed"
        return _failed(itself, message, evidence, parted / len(whole))
    noise = np.concatenate([np.subtract(*common(*pair)) for pair in zip(whole, again, strict=True)])
    steady = len(noise) > 0 and float(np.abs(noise).mean()) <= itself.gates.mean
    enough = sum(len(one) for one, _ in pairs) >= LEAST_SHARED * sum(len(one.token_ids) for one in whole)
    if (status is Outcome.FAIL and steady) or (status is Outcome.PASS and enough):
        return told
    message = "the engine does not repeat itself whole either, so what a stream changes cannot be told"
    return vacuous(Probe.STREAM, message, parting)


def _with_numbers(evidence: StreamEvidence, numbers: Evidence | None) -> StreamEvidence | None:
    """With the numbers of tokens that whole and streamed answers share; None where they share none."""
    if not isinstance(numbers, AgreementEvidence):
        return None
    return msgspec.structs.replace(
        evidence, tokens=numbers.tokens, differing=numbers.differing, mean=numbers.mean, max=numbers.max
    )


def _failed(
    itself: SelfConsistency, message: str, evidence: StreamEvidence, share: float = 1.0
) -> ProbeResult:
    cause = found(CAUSE, itself.engine.name, Probe.STREAM, message, explained=share)
    return answered(Probe.STREAM, Outcome.FAIL, message, evidence, causes=(cause,))


def _broken(whole: Completion, answer: Answer) -> str | None:
    """What neither rounding nor another draw explains."""
    if not answer.completions:
        return answer.problems[0].message if answer.problems else "no sample came"
    pieced = answer.completions[0]
    if pieced.prompt_token_ids != whole.prompt_token_ids:
        return f"they show a prompt of {len(pieced.prompt_token_ids)} tokens that is not the one shown whole"
    ends = whole.finish_reason, pieced.finish_reason
    counts = len(whole.token_ids), len(pieced.token_ids)
    if ends == (FinishReason.LENGTH, FinishReason.LENGTH) and counts[0] != counts[1]:
        return f"{counts[0]} tokens whole and {counts[1]} streamed, both up to the length that was asked for"
    if whole.token_ids == pieced.token_ids and ends[0] is not ends[1]:
        return f"the same tokens end by {ends[0]} whole and by {ends[1]} streamed"
    return None


def _same(one: Completion, other: Completion) -> bool:
    """To the bit: an engine that computes anew in another order has other last bits somewhere."""
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
