"""A few sequences before an audit: how fast are engine and reference, and how many more fit into the time that is given?

What comes out are numbers of a configuration, which the run directory keeps: a run that is resumed asks the same plan,
however fast the machine is by then.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from zerodrift.audit.checked_calls import generated
from zerodrift.audit.measure import Observed, measure
from zerodrift.audit.plan import parity_requests
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.validation import MOST_TRIALS, ValidationConfig
from zerodrift.core.errors import ConfigError
from zerodrift.core.request import Prompt, Request, SamplingParams

SEQUENCES = 16
"""Asked together, as an audit does; half as many as it has in flight, so that what is promised is rather too little."""
WARM = 2
"""Asked and scored before the clock runs: both sides compile, or fill their caches, on their first request."""
PASSES = 3
"""Of scoring, that a whole audit takes: once, for the floor, and for what is asked beside."""
BESIDE = 48
"""Sequences that all other probes come to, whatever the number of trials: 6.3 s of 15 s where 64 trials took 8.4 s."""
SHARE = 0.8
"""Of the budget that is planned: a failing audit also looks for causes."""
LEAST_TRIALS, MOST_PROMPTS = 16, 256


class Speed(NamedTuple):
    """Seconds per sequence."""

    engine: float
    reference: float

    @property
    def per_trial(self) -> float:
        """Of an audit."""
        return self.engine + PASSES * self.reference


def measure_speed(
    engine: Backend,
    reference: ReferenceBackend,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    seeded: bool,
) -> Speed:
    """Ask and score as the audit will."""
    requests = [_askable(each, seeded=seeded) for each in parity_requests(prompts, sampling, SEQUENCES, 0)]
    stops = reference.facts.eos_token_ids
    measure(reference.teacher, _answered(engine, requests[:WARM]), stops)
    began = time.monotonic()
    observed = _answered(engine, requests)
    asked = time.monotonic()
    measure(reference.teacher, observed, stops)
    scored = time.monotonic()
    # The first prompts are longer than the others: what they take is scaled by their tokens.
    mean = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts) + sampling.max_tokens
    share = mean / max(1, sum(item.length for item in observed))
    return Speed((asked - began) * share, (scored - asked) * share)


def _answered(engine: Backend, requests: Sequence[Request]) -> list[Observed]:
    return [
        Observed(completion, request.sampling)
        for request, answer in zip(requests, generated(engine, requests), strict=True)
        for completion in answer.completions
        if completion.token_ids
    ]


def fitted(validation: ValidationConfig, speed: Speed, seconds: float) -> ValidationConfig:
    """As many trials and prompts as fit; a task keeps its prompts, and is only asked more often."""
    trials = min(MOST_TRIALS, int(SHARE * seconds / speed.per_trial) - BESIDE)
    least = LEAST_TRIALS if validation.task is None else validation.num_prompts
    if trials < least:
        needed = (least + BESIDE) * speed.per_trial / SHARE
        raise ConfigError(
            f"a sequence takes {speed.engine:.2g} s of the engine and {speed.reference:.2g} s of the reference, and "
            f"{least} are the least to judge by: give --budget {needed / 60:.0f}m or more, or shorten "
            "validation.max_tokens"
        )
    prompts = validation.num_prompts
    if validation.task is None:
        prompts = max(1, min(trials // 2, MOST_PROMPTS) - len(validation.position_probes))
    return msgspec.structs.replace(validation, num_prompts=prompts, equivalence_trials=trials)


def _askable(request: Request, *, seeded: bool) -> Request:
    if seeded:
        return request
    return Request(request.prompt, msgspec.structs.replace(request.sampling, seed=None))
