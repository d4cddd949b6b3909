"""Do requests without a seed draw anew? The same few prompts several times over, in one call and in another.

A second sample of a prompt owes nothing to the first. Whoever believes that it repeats the first bets half of what they have
on each of its tokens, at fair odds, until the two part: winnings of e^14 come once in a million healthy audits.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from zerodrift.audit.checked_calls import generated
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged
from zerodrift.backends.base import Backend
from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt, Request
from zerodrift.drift.sampling import SAMPLING_ALPHA
from zerodrift.records.evidence import AnewEvidence
from zerodrift.records.verdict import Outcome, Probe

NAME = Probe.UNSEEDED
CAUSE = "semantic/seed"
PROMPTS, LONGEST = 3, 32
AT_STAKE = 0.5
"""Of what was won so far, on each token. All of it would win more, and be lost where a healthy server rounds otherwise twice."""


def unseeded(engine: Backend, requests: Sequence[Request]) -> ProbeResult:
    """Each prompt twice at once, and then once more."""
    asked = [_without_seed(request) for request in requests[:PROMPTS]]
    together = _samples(engine, [*asked, *asked])
    again = _samples(engine, asked)
    if len(together) != 2 * len(asked) or len(again) != len(asked):
        return not_judged(NAME, "the engine gave no usable sample for a request without a seed")
    first, second = together[: len(asked)], together[len(asked) :]
    pairs = [*zip(first, second, strict=True), *zip(first, again, strict=True)]
    log_e = sum(won(one, other) for one, other in pairs)
    equal = sum(one.token_ids == other.token_ids for one, other in pairs)
    if log_e < -math.log(SAMPLING_ALPHA):
        # Nothing of it is drawn by the seed of the audit: a verdict that held its figures would be another each time.
        message = f"{len(pairs)} pairs of samples of the same prompts owe each other nothing"
        return answered(NAME, Outcome.PASS, message, AnewEvidence(pairs=len(pairs)))
    evidence = AnewEvidence(pairs=len(pairs), equal=equal, log_e=log_e)
    message = f"without a seed {equal} of {len(pairs)} samples repeat another of the same prompt ({log_e:.0f} nats against chance)"
    cause = found(CAUSE, engine.name, NAME, message, explained=max(equal, 1) / len(pairs), gating=True)
    return answered(NAME, Outcome.FAIL, message, evidence, causes=(cause,))


def won(one: Completion, other: Completion) -> float:
    """Log of what a bet of AT_STAKE on each token of `one` wins of `other`, until they part."""
    total = 0.0
    for token, told, drawn in zip(one.token_ids, one.logprobs, other.token_ids, strict=False):
        # What is reported to be certain wins nothing.
        pays = np.exp(-min(told, 0.0)) if token == drawn else 0.0
        total += math.log1p(AT_STAKE * (pays - 1))
        if token != drawn:
            break
    return total


def _without_seed(request: Request) -> Request:
    prompt = Prompt(request.prompt.token_ids[:LONGEST])
    return Request(prompt, msgspec.structs.replace(request.sampling, seed=None))


def _samples(engine: Backend, requests: Sequence[Request]) -> list[Completion]:
    groups = [answer.completions for answer in generated(engine, requests)]
    return [group[0] for group in groups if group and np.isfinite(group[0].logprobs).all()]
