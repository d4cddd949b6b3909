"""How far can rounding alone move a logprob? Measured, per token, by computing it in eight equivalent ways.

The variants differ in what exact arithmetic would not see: attention implementation, batch layout, chunking. They
run in the precision that the engine is expected to have; the spread around the reference is the token's σ. What is
scored is what is compared: logits are divided by the temperature of the request, and so is their rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from zerodrift.backends import variants
from zerodrift.backends.teacher import Layout, Teacher, entries
from zerodrift.core.errors import ConfigError
from zerodrift.core.request import SamplingParams
from zerodrift.drift.floor import Floor
from zerodrift.drift.strata import equal_groups
from zerodrift.stats.arrays import Floats
from zerodrift.stats.kl import k3

T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARE = 8
"""The floor is measured on one sequence in so many, eight variants each: one more scoring pass in all, or two where
forwards are so small that their number counts."""
LEAST_SEQUENCES, MOST_SEQUENCES = 6, 32
"""32 and 64 of 512 sequences give means within 1.3 % of each other and curves within 5 %. The 64 took 2.2 scoring
passes over all 512 on a model of three layers, and a whole audit is to take three."""
ROUGHLY = 4
"""Variants that tell how coarse another precision would be. The first four differ in attention and in batch layout,
and take no more than a forward for each sequence."""
BINS = 8
"""σ of a token that was not re-scored is read off a curve over log p with this many points."""


class Passage(NamedTuple):
    """Ids of a sequence, and the index of the first token whose logprob is wanted."""

    ids: tuple[int, ...]
    start: int


def equivalent_teachers(model: Any, precision: str) -> list[Teacher]:
    """Up to eight ways of computing the same thing in `precision`: as many as this model has."""
    if precision not in DTYPES:
        raise ConfigError(f"precision {precision!r} has no rounding floor; choose one of {', '.join(DTYPES)}")
    rounded = variants.in_dtype(model, DTYPES[precision])
    teachers = [
        Teacher(rounded, layout=Layout.ALONE, attention="sdpa"),
        Teacher(rounded, layout=Layout.ALONE, attention="eager"),
        Teacher(rounded, layout=Layout.PADDED, attention="sdpa", batch=4),
        Teacher(rounded, layout=Layout.PADDED, attention="eager", batch=7),
        Teacher(rounded, layout=Layout.DECODED, attention="sdpa"),
        Teacher(rounded, layout=Layout.CHUNKED, attention="sdpa", chunk=32),
        Teacher(rounded, layout=Layout.CHUNKED, attention="eager", chunk=24),
        Teacher(rounded, layout=Layout.CHUNKED, attention="eager", chunk=65),
    ]
    # Without a KV cache, or a choice of attention, some are the same computation.
    return list({each.computation: each for each in teachers}.values())


def some_of(sequences: Sequence[T]) -> Sequence[T]:
    """As many as the floor is measured on, evenly from first to last."""
    count = min(MOST_SEQUENCES, max(LEAST_SEQUENCES, len(sequences) // SHARE))
    return sequences[:: max(1, len(sequences) // count)]


def measure_floor(
    model: Any,
    sequences: Sequence[Passage],
    precision: str,
    most_variants: int | None = None,
    sampled_with: Sequence[SamplingParams] = (),
) -> Floor:
    """Score `sequences` in every variant, and compare with the model's own precision.

    `sampled_with` are the parameters of each, of which the temperature counts; without them it is 1.
    """
    temperatures = [1.0 if params.greedy else params.temperature for params in sampled_with]
    scales = [temperatures or [1.0] * len(sequences)]
    if any(temperature != 1 for temperature in temperatures):
        scales.append([1.0] * len(sequences))
    exact = _score(Teacher(model, layout=Layout.PADDED), sequences, scales)
    teachers = equivalent_teachers(model, precision)[:most_variants]
    variants_of = [_score(teacher, sequences, scales) for teacher in teachers]
    shaped, *plain = (
        _floor(precision, own, np.stack([scores[number] for scores in variants_of]))
        for number, own in enumerate(exact)
    )
    return msgspec.structs.replace(shaped, unshaped=plain[0]) if plain else shaped


def _floor(precision: str, exact: Floats, told: Floats) -> Floor:
    deviations = told - exact
    per_token = np.sqrt((deviations**2).mean(axis=0))
    groups = equal_groups(exact, BINS)
    return Floor(
        precision=precision,
        num_variants=len(told),
        num_tokens=len(exact),
        mean=float(np.abs(deviations).mean()),
        p90=float(np.quantile(np.abs(deviations), 0.9)),
        edges=tuple(float(exact[group].mean()) for group in groups),
        sigmas=tuple(float(np.sqrt((per_token[group] ** 2).mean())) for group in groups),
        # Δ has this sign: the reference's less the other's.
        k3=float(k3(-deviations.ravel()).mean()),
    )


def _score(teacher: Teacher, sequences: Sequence[Passage], scales: Sequence[Sequence[float]]) -> list[Floats]:
    """Logprobs of all tokens end to end, once for each list of temperatures, from one forward."""
    ids, starts = [item.ids for item in sequences], [item.start for item in sequences]
    scores: list[list[list[torch.Tensor]]] = [[[] for _ in sequences] for _ in scales]
    for rows in teacher.logit_rows(ids, starts):
        first = starts[rows.sequence] + rows.begin
        wide_TV = rows.logits_TV if rows.logits_TV.dtype is torch.float64 else rows.logits_TV.float()
        tokens = ids[rows.sequence][first : first + len(wide_TV)]
        for kept, temperatures in zip(scores, scales, strict=True):
            kept[rows.sequence].append(entries(wide_TV / temperatures[rows.sequence], tokens))
    return [torch.cat([part for parts in kept for part in parts]).double().numpy() for kept in scores]
