"""The requests that every contender serves: fixed by a seed, mixed in length, and as long as they are told to be."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from zerodrift.core.errors import InvalidValue

SHORTEST, LONGEST = 16, 256
"""Tokens of a prompt, and of an output: rollouts of a small task."""


class Job(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    num_tokens: int
    """Tokens to generate, whatever the model would rather do: all contenders do the same work."""


def mixed(count: int, vocab_size: int, context: int, seed: int = 0) -> list[Job]:
    """`count` requests with random tokens, so that no two share a prefix."""
    if count < 1:
        raise InvalidValue(f"asked for {count} requests; a measurement needs one at least")
    if context < 2 * LONGEST:
        raise InvalidValue(
            f"the model's context of {context} is below the {2 * LONGEST} tokens of the longest request; "
            "choose a model with a longer one"
        )
    draw = random.Random(seed)
    return [
        Job(
            tuple(draw.randrange(vocab_size) for _ in range(draw.randint(SHORTEST, LONGEST))),
            draw.randint(SHORTEST, LONGEST),
        )
        for _ in range(count)
    ]


def shortened(jobs: Sequence[Job], divisor: int) -> list[Job]:
    """The same mixture at a fraction of its cost, to choose settings by."""
    return [
        Job(job.prompt[: max(1, len(job.prompt) // divisor)], max(1, job.num_tokens // divisor))
        for job in jobs
    ]


def prompt_tokens(jobs: Sequence[Job]) -> int:
    """Tokens that go in."""
    return sum(len(job.prompt) for job in jobs)


def output_tokens(jobs: Sequence[Job]) -> int:
    """Tokens that come out: what throughput counts."""
    return sum(job.num_tokens for job in jobs)
