"""Did the prefix cache serve what belongs to another prompt? Then an output has the numbers it would have if the tokens that
came from the cache were another request's, and the rest its own.

Asked before outputs are said to be misbound: a prompt that differs within what was served alone is both, and what comes
with hits of the cache is the cache's.
"""

from collections.abc import Sequence

import numpy as np

from zerodrift.audit.counterfactual.binding import AT_HOME, MOST_PROMPTS, WORST, gap_behind
from zerodrift.audit.measure import Measurement
from zerodrift.backends.teacher import Teacher
from zerodrift.drift.gates import Gates

FAR = 10.0
"""Gates of the mean: a prefix of another prompt that differs by one token moves an output by hundreds of them."""


def find_served(teacher: Teacher, measurements: Sequence[Measurement], gates: Gates) -> str | None:
    """The evidence in words, or None where no other prefix explains the worst outputs of requests with hits."""
    sizes = np.array([float(np.abs(item.delta).mean()) for item in measurements])
    hits = np.array([bool(item.observed.completion.cached_tokens) for item in measurements])
    off = sizes > FAR * gates.mean
    if not (off & hits).any() or (off & ~hits).any():
        # What is wrong without a hit as well is nothing that the cache did alone.
        return None
    worst = [index for index in np.argsort(-sizes).tolist() if off[index] and hits[index]][:WORST]
    for index in worst:
        whose = _whose_prefix(teacher, measurements, index, gates, float(sizes[index]))
        if whose is not None:
            count = measurements[index].observed.completion.cached_tokens
            return (
                f"the output of request {index} has the logprobs it would have if the {count} tokens that came from the "
                f"prefix cache were those of request {whose}; {int(off.sum())} of {int(hits.sum())} outputs with a hit are "
                f"wrong, and none of {int((~hits).sum())} without"
            )
    return None


def _whose_prefix(
    teacher: Teacher, measurements: Sequence[Measurement], index: int, gates: Gates, size: float
) -> int | None:
    item = measurements[index]
    own, cached = item.observed.completion.prompt_token_ids, item.observed.completion.cached_tokens or 0
    prompts: dict[tuple[int, ...], int] = {}
    for number, other in enumerate(measurements):
        prefix = other.observed.completion.prompt_token_ids[:cached]
        if len(prefix) == cached and prefix != own[:cached]:
            prompts.setdefault((*prefix, *own[cached:]), number)
    nearest = sorted(prompts, key=lambda prompt: _differing(prompt, own))[:MOST_PROMPTS]
    gaps = gap_behind(teacher, item, nearest)
    for prompt, gap in zip(nearest, gaps, strict=True):
        if gap < AT_HOME * gates.mean and gap < size / 10:
            return prompts[prompt]
    return None


def _differing(one: Sequence[int], other: Sequence[int]) -> int:
    """Caches take what is almost the same for the same."""
    return sum(a != b for a, b in zip(one, other, strict=True))
