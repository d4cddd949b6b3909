"""Is what came back an answer at all: one for each question, one finite number for each token?

A NaN compares false with everything, and a row too few would be compared with its neighbour: both are refused here,
so that a probe ends as not judged and never as passed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerodrift.audit.plan import singly
from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.errors import BadAnswer, CapabilityMissing, InvalidValue
from zerodrift.core.request import Request
from zerodrift.core.task import Scorer
from zerodrift.stats.arrays import Floats


def generated(engine: Backend, requests: Sequence[Request]) -> list[Answer]:
    """One answer per request, whatever is in it."""
    return _counted(engine, requests, engine.generate(requests))


ONE_IN = 4
"""Samples that are asked for where each is a request of its own: 2,800 took llama.cpp three minutes with a model of 135 million
parameters. What fewer would not show, their power says."""


def drawn(engine: Backend, requests: Sequence[Request]) -> list[tuple[Request, Completion]]:
    """All samples that came back, each with its request; of an engine that draws one at a time a quarter of them."""
    try:
        answers = generated(engine, requests)
    except CapabilityMissing:
        requests = [single for request in requests for single in singly(request)[::ONE_IN]]
        answers = generated(engine, requests)
    pairs = zip(requests, answers, strict=True)
    return [(request, completion) for request, answer in pairs for completion in answer.completions]


def streamed(engine: Backend, requests: Sequence[Request]) -> list[Answer]:
    """The same, put together from pieces."""
    return _counted(engine, requests, engine.stream(requests))


def _counted(engine: Backend, requests: Sequence[Request], answers: list[Answer]) -> list[Answer]:
    if len(answers) != len(requests):
        raise BadAnswer(
            f"{engine.name} gave {len(answers)} answers to {len(requests)} requests; outputs cannot be told apart"
        )
    return answers


def scored(scorer: Scorer | Backend, sequences: Sequence[Sequence[int]], whose: str) -> list[Floats]:
    """Raw logprobs of every token but the first, of each sequence."""
    told = scorer.score(sequences)
    if len(told) != len(sequences):
        raise BadAnswer(f"{whose} gave {len(told)} rows of scores for {len(sequences)} sequences")
    rows = [np.array(row, dtype=np.float64) for row in told]
    for ids, row in zip(sequences, rows, strict=True):
        if len(row) != len(ids) - 1 or not np.isfinite(row).all():
            raise BadAnswer(
                f"{whose} gave {len(row)} numbers for {len(ids)} tokens, or some that are not finite; "
                "it must give one finite logprob for every token but the first"
            )
    return rows


def score_user_forward(scorer: Scorer, sequences: Sequence[Sequence[int]], whose: str) -> list[Floats]:
    """The same of a scorer that the user wrote, which fails in any way it likes and is never taken for the engine."""
    try:
        rows = [_numbers(row) for row in scorer.score(sequences)]
    except (Exception, SystemExit) as error:
        message = str(error).partition("\n")[0]
        raise InvalidValue(
            f"{whose} failed: {type(error).__name__}{f': {message}' if message else ''}"
        ) from error
    if len(rows) != len(sequences):
        raise InvalidValue(f"{whose} gave {len(rows)} rows of scores for {len(sequences)} sequences")
    for index, (ids, row) in enumerate(zip(sequences, rows, strict=True)):
        if row.shape != (len(ids) - 1,):
            raise InvalidValue(
                f"{whose} gave scores of shape {row.shape} for sequence {index} of {len(ids)} tokens; "
                "it must give one logprob for every token but the first"
            )
        if not np.isfinite(row).all():
            raise InvalidValue(f"{whose} gave NaN or infinities for sequence {index}; logprobs are finite")
    return rows


def _numbers(row: Any) -> Floats:
    """A row of any kind of numbers; a tensor may need gradients, be in bf16, or on a GPU."""
    plain = row.detach().double().cpu().numpy() if hasattr(row, "detach") else row
    return np.asarray(plain, dtype=np.float64)
