"""Parity the other way round: what does the engine make of tokens that the reference sampled?

An engine is asked for its own samples first, and a fault that keeps it from ever sampling a token leaves no trace in
those. Here the tokens are given: freshly sampled by the reference, or read from a recorded baseline, which may come
from another process, machine or year.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.checked_calls import scored
from zerodrift.audit.probes.result import ProbeResult, answered, not_judged
from zerodrift.backends.base import Backend, Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import DigestMismatch
from zerodrift.core.request import Request
from zerodrift.drift.gates import Gates
from zerodrift.records.baseline import BaselineHeader, BaselineRow
from zerodrift.records.evidence import GapEvidence
from zerodrift.records.verdict import CauseFound, Outcome, Probe
from zerodrift.stats.arrays import Floats

Meaning = Callable[[Sequence[tuple[int, ...]], Sequence[Floats]], CauseFound | None]
"""Sequences, and wrong scores of their last tokens, to what those are instead."""
MOST_ROWS = 32
"""Rows of a baseline that are scored: an eighth of its default length, and enough for a mean."""


class Given(NamedTuple):
    """A sequence that the reference sampled, with its raw logprobs of the output."""

    ids: tuple[int, ...]
    logprobs: Floats


def sampled_by(reference: ReferenceBackend, requests: Sequence[Request]) -> list[Given]:
    """One sample of the reference for each request."""
    completions = [answer.completions[0] for answer in reference.generate(requests)]
    scores = reference.score([completion.sequence for completion in completions])
    return [
        Given(completion.sequence, np.array(row[len(completion.prompt_token_ids) - 1 :]))
        for completion, row in zip(completions, scores, strict=True)
    ]


def recorded_in(rows: Sequence[BaselineRow]) -> list[Given]:
    """Rows of a baseline from all over it, those without output left out."""
    full = [row for row in rows if row.output]
    step = max(1, len(full) // MOST_ROWS)
    return [Given(row.prompt + row.output, np.array(row.raw_logprobs)) for row in full[::step][:MOST_ROWS]]


def given_tokens(
    engine: Backend, given: Sequence[Given], gates: Gates, meaning: Meaning = lambda ids, told: None
) -> ProbeResult:
    """The engine's score of tokens that it did not sample; where it is wrong, `meaning` says what it is instead."""
    if Capability.SCORE not in engine.capabilities:
        return not_judged(Probe.GIVEN_TOKENS, "the engine does not score given tokens")
    ids = [item.ids for item in given]
    told = scored(engine, ids, engine.name)
    result = _judge(Probe.GIVEN_TOKENS, told, given, gates)
    if result.status is not Outcome.FAIL:
        return result
    outputs = [row[len(row) - len(item.logprobs) :] for row, item in zip(told, given, strict=True)]
    meant = meaning(ids, outputs)
    return result if meant is None else msgspec.structs.replace(result, causes=(meant,))


def check_weights(reference: ReferenceBackend, header: BaselineHeader) -> None:
    """Raise unless the baseline was recorded from the reference's weights."""
    if reference.version.digest != header.weights:
        raise DigestMismatch(
            f"the baseline was recorded from weights {header.weights}, and {reference.spec} has "
            f"{reference.version.digest}; record it again, or audit the checkpoint that it was made from"
        )


def same_reference(
    reference: ReferenceBackend, header: BaselineHeader, given: Sequence[Given], gates: Gates
) -> ProbeResult:
    """Does the reference still say what it said when the baseline was recorded?

    Where it does not, the ground truth itself has moved (a library, a kernel), and nothing can be judged by it.
    """
    told = scored(reference, [item.ids for item in given], "the reference")
    result = _judge(Probe.BASELINE, told, given, gates)
    if result.status is Outcome.PASS:
        return result
    was, now = header.reference.numeric, reference.fingerprint().numeric
    moved = [f"{key} {was.get(key)} → {value}" for key, value in now.items() if was.get(key) != value]
    changed = "; ".join(moved) or "nothing that its fingerprint shows"
    message = f"the reference no longer says what it recorded ({result.message}); changed since: {changed}"
    return not_judged(Probe.BASELINE, message, required=True)


def _judge(probe: Probe, told: Sequence[Floats], given: Sequence[Given], gates: Gates) -> ProbeResult:
    gaps = np.abs(
        np.concatenate(
            [
                row[len(row) - len(item.logprobs) :] - item.logprobs
                for row, item in zip(told, given, strict=True)
            ]
        )
    )
    mean = float(gaps.mean())
    evidence = GapEvidence(tokens=len(gaps), mean=mean, max=float(gaps.max()))
    status = Outcome.PASS if mean <= gates.mean else Outcome.FAIL
    return answered(probe, status, f"mean |Δ| {mean:.3g} over {len(gaps)} tokens", evidence)
