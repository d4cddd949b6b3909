"""Do requests without a seed draw anew, and each token of them? The same few prompts several times over, in one call and in another.

A second sample of a prompt owes nothing to the first. Whoever believes that it repeats the first bets half of what they have
on each of its tokens, at fair odds, until the two part: winnings of e^14 come once in a million healthy audits.

An engine draws requests that have no seed by a generator of another kind, and an audit gives a seed to all of its own. So some
are drawn without one and tested as rollouts are, at a temperature at which hardly a token is due twice: noise that serves two
tokens of an output then shows in few of them.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from zerodrift.audit.checked_calls import generated
from zerodrift.audit.measure import Observed, measure, tabulate
from zerodrift.audit.probes.parity import samples
from zerodrift.audit.probes.result import ProbeResult, answered, found, not_judged
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.floor import Floor
from zerodrift.drift.sampling import SAMPLING_ALPHA, draws_depend
from zerodrift.records.evidence import AnewEvidence, SamplingEvidence
from zerodrift.records.verdict import Outcome, Probe

NAME = Probe.UNSEEDED
CAUSE = "semantic/seed"
PROMPTS, LONGEST = 3, 24
HOT = 18
HOTLY = SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True)
"""288 tokens: where every second one is drawn by the noise of the one before, a third of those come again and one in fifty is due."""
NO_FLOOR = Floor("float32", 0, 0, 0.0, 0.0, edges=(-100.0, 0.0), sigmas=(1e-6, 1e-6))
"""Draws are tested, and no number: rounding of those is not looked at."""
AT_STAKE = 0.5
"""Of what was won so far, on each token. All of it would win more, and be lost where a healthy server rounds otherwise twice."""


def unseeded(engine: Backend, reference: ReferenceBackend, requests: Sequence[Request]) -> ProbeResult:
    """Each prompt twice at once, and then once more; and if those owe each other nothing, some at a high temperature."""
    apart = _apart(engine, requests)
    return apart if apart.status is not Outcome.PASS else _drawn(engine, reference, requests, apart)


def _drawn(
    engine: Backend, reference: ReferenceBackend, requests: Sequence[Request], apart: ProbeResult
) -> ProbeResult:
    stop_ids = reference.facts.eos_token_ids
    answers = generated(engine, [_hot(requests, number) for number in range(HOT)])
    observed = [
        Observed(each, HOTLY)
        for answer in answers
        for each in answer.completions
        if each.token_ids and np.isfinite(each.logprobs).all()
    ]
    if not observed:
        return not_judged(NAME, "the engine gave no usable sample for a request without a seed")
    table = tabulate(measure(reference.teacher, observed, stop_ids), NO_FLOOR)
    tested = samples(table, NAME, greedy=False)
    if tested.status is not Outcome.FAIL:
        # Chance of one in ten thousand is none of a fault that is everywhere.
        return apart
    message = f"without a seed {tested.message}"
    depend = isinstance(tested.evidence, SamplingEvidence) and draws_depend(tested.evidence)
    cause = found(CAUSE if depend else "semantic/sampling-bias", engine.name, NAME, message, gating=True)
    return msgspec.structs.replace(apart, status=Outcome.FAIL, message=message, causes=(cause,))


def _hot(requests: Sequence[Request], number: int) -> Request:
    """A short prompt that no other of these has."""
    ids = requests[number % len(requests)].prompt.token_ids
    begin = LONGEST * (number // len(requests))
    return Request(Prompt(ids[begin : begin + LONGEST] or ids[:LONGEST]), HOTLY)


def _apart(engine: Backend, requests: Sequence[Request]) -> ProbeResult:
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
