"""Were outputs handed to the wrong requests? Then another prompt explains an output's numbers, to the last digit."""

from collections.abc import Sequence

import numpy as np
import torch

from zerodrift.audit.measure import Measurement
from zerodrift.backends.teacher import Teacher
from zerodrift.drift.gates import Gates
from zerodrift.sampler.processing import histories, processed_logprobs

WORST = 3
"""Outputs that are tried under other prompts."""
LEAST_AT_HOME = 2
"""Of those, so many must be found at home elsewhere."""
MOST_PROMPTS = 40
AT_HOME = 20.0
"""Gates: an output is explained by a prompt if its mean |Δ| under it is within this many, and ten times better."""
FAR_FROM_HOME = 0.05
"""Nats: another prompt moves an output by tenths of a nat a token; rounding and wrong precision do not."""


def find_misbound(teacher: Teacher, measurements: Sequence[Measurement], gates: Gates) -> str | None:
    """The evidence in words, or None where no other prompt explains the worst outputs."""
    sizes = [float(np.abs(item.delta).mean()) for item in measurements]
    worst = [i for i in np.argsort(sizes)[::-1].tolist() if sizes[i] > max(FAR_FROM_HOME, 10 * gates.mean)][
        :WORST
    ]
    homes = [(index, _home_of(teacher, measurements, index, gates, sizes[index])) for index in worst]
    found = [(index, home) for index, home in homes if home is not None]
    # An output that is handed over has a home elsewhere, and so has each of the worst. One alone may be at home behind a
    # prompt that differs from its own by what the engine overlooks.
    if not found or len(found) < min(LEAST_AT_HOME, len(worst)):
        return None
    index, home = found[0]
    away = sum(size > AT_HOME * gates.mean for size in sizes)
    return (
        f"the output of request {index} has the logprobs it would have after the prompt of request {home}; "
        f"{away} of {len(sizes)} outputs are not at home"
    )


def _home_of(
    teacher: Teacher, measurements: Sequence[Measurement], index: int, gates: Gates, size: float
) -> int | None:
    item = measurements[index]
    own = item.observed.completion.prompt_token_ids
    prompts = {
        other.observed.completion.prompt_token_ids: number for number, other in enumerate(measurements)
    }
    prompts.pop(own, None)
    # Requests that were in flight together are the likeliest to be mixed up: nearest neighbours first.
    nearest = sorted(prompts.items(), key=lambda entry: abs(entry[1] - index))[:MOST_PROMPTS]
    gaps = gap_behind(teacher, item, [prompt for prompt, _ in nearest])
    for (_, number), gap in zip(nearest, gaps, strict=True):
        if gap < AT_HOME * gates.mean and gap < size / 10:
            return number
    return None


def gap_behind(teacher: Teacher, item: Measurement, prompts: Sequence[tuple[int, ...]]) -> list[float]:
    """Mean |Δ| of an output if it had come behind each of these prompts."""
    output = item.observed.completion.token_ids
    rows = teacher.logits([prompt + output for prompt in prompts], [len(prompt) for prompt in prompts])
    gaps = []
    for prompt, logits_TV in zip(prompts, rows, strict=True):
        wide_TV = logits_TV if logits_TV.dtype is torch.float64 else logits_TV.float()
        drawn_TV = processed_logprobs(wide_TV, item.observed.requested, histories(prompt, output))
        scores = drawn_TV[torch.arange(len(output)), torch.tensor(output)].double().numpy()
        gaps.append(float(np.abs(scores - item.reported).mean()))
    return gaps
