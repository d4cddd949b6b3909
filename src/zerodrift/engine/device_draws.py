"""Draws on a GPU for requests that ask for nothing but a temperature: three kernels and one look back for all of them.

Everything else (truncation, penalties, alternatives, logits) goes through the sampler that CPUs have. Which way a
request goes is up to its parameters alone, and both report what the trainer's log-softmax gives.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module

import torch

from zerodrift.core.completion import LogprobKind
from zerodrift.core.request import SamplingParams
from zerodrift.engine.plan import Draw, Drawn


def only_temperature(params: SamplingParams, kind: LogprobKind) -> bool:
    """Whether a logit, its row's sum and a temperature are all that the token and its number need."""
    changed = (
        params.truncates or params.penalises or params.logit_bias or params.min_tokens or params.logprobs
    )
    return not changed and (kind is LogprobKind.PROCESSED or params.temperature in (0, 1))


def draw(logits_RV: torch.Tensor, rows: Sequence[Sequence[Draw]]) -> Iterator[tuple[Draw, Drawn | None]]:
    """Each draw of each row with what it gave; None where the row's logits are not finite."""
    vocabulary = import_module("zerodrift.exact.ops.triton.vocabulary")
    flat = [(index, draw) for index, draws in enumerate(rows) for draw in draws]
    drawn = vocabulary.draw(
        logits_RV,
        [draws[0].sampling.temperature or 1.0 for draws in rows],
        vocabulary.Draws(
            [index for index, _ in flat],
            [_seed(draw) for _, draw in flat],
            [draw.sample_index for _, draw in flat],
            [len(draw.output) for _, draw in flat],
            [draw.forced for _, draw in flat],
            [draw.sampling.greedy for _, draw in flat],
        ),
    )
    for (_, each), token, logprob, entropy, finite in zip(flat, *drawn, strict=True):
        yield each, Drawn(token, logprob, (), None, (), entropy) if finite else None


def _seed(draw: Draw) -> int:
    seed = draw.sampling.seed
    assert seed is not None, "the engine gives every request a seed"
    return seed
