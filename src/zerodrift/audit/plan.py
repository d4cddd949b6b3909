"""Which requests an audit sends. A plan is a pure function of configuration and prompts, so a run can resume."""

from collections.abc import Sequence

import msgspec
import numpy as np

from zerodrift.core.errors import InvalidPrompt
from zerodrift.core.request import MAX_SEED, Prompt, Request, SamplingParams

PAIRED_EVERY = 8
"""One request in so many draws two samples, to see that they differ."""
SEED_STRIDE = 16
"""vLLM draws sample i with seed + i: seeds of neighbouring requests must lie further apart than n."""
PROBE_REQUESTS = 6
PROBE_TOKENS = 8
"""Of each, asked for one at a time: with 16 the probes of self-consistency took a quarter of a small audit."""
SYNC_REQUESTS = 8
"""One for each of eight replicas that are served in turn."""
DRAWS_PER_REQUEST = 32
LONG_PROMPT = 300
"""Longer than two of the largest cache blocks in use (128 tokens, vLLM on CPU)."""
UNCACHED_PROMPT = 120
"""Where no cached token is ever reported there is no block to fill."""
SHORTER_BY = 7
"""Each probe is shorter than the one before by this, so that no two end at the same place of a block."""


def parity_requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, trials: int, seed: int
) -> list[Request]:
    """`trials` samples dealt over the prompts in turn, each with a seed of its own.

    Every prompt is asked before one draws twice.
    """
    requests: list[Request] = []
    number = drawn = 0
    while drawn < trials:
        # Beside this one, so many prompts have not been asked yet.
        unasked = max(0, len(prompts) - number - 1)
        spare = trials - drawn - 1 > unasked
        n = 2 if number % PAIRED_EVERY == 0 and not sampling.greedy and spare else 1
        params = msgspec.structs.replace(sampling, seed=_seed(seed + SEED_STRIDE * number), n=n)
        requests.append(Request(prompts[number % len(prompts)], params))
        number, drawn = number + 1, drawn + n
    return requests


def asked_again(asked: Sequence[Request], times: int = 1) -> list[Request]:
    """The same so many times more, with seeds that go on where those of `asked` end.

    With equal seeds an engine that draws as the reference does would repeat its tokens, and agree by construction.
    """
    further = SEED_STRIDE * len(asked)
    return [
        Request(
            request.prompt,
            msgspec.structs.replace(
                request.sampling, seed=_seed((request.sampling.seed or 0) + time * further)
            ),
        )
        for time in range(1, times + 1)
        for request in asked
    ]


def probe_requests(
    vocab_size: int,
    max_model_len: int,
    special: Sequence[int],
    seed: int,
    count: int = PROBE_REQUESTS,
    longest: int = LONG_PROMPT,
) -> list[Request]:
    """Long prompts of random ids at temperature 1: for caches, batches and weight updates."""
    rng = np.random.default_rng(seed)
    allowed = np.setdiff1d(np.arange(vocab_size), np.array(special, dtype=np.int64))
    length = min(longest, max_model_len - PROBE_TOKENS - 1)
    least = SHORTER_BY * (count - 1) + 1
    if length < least:
        raise InvalidPrompt(
            f"a context of {max_model_len} leaves {length} tokens beside {PROBE_TOKENS} that are answered and one more, "
            f"and probes need prompts of {least}; give the engine a longer context"
        )
    return [
        Request(
            Prompt(tuple(rng.choice(allowed, length - SHORTER_BY * number).tolist())),
            SamplingParams(temperature=1.0, max_tokens=PROBE_TOKENS, seed=_seed(seed + number)),
        )
        for number in range(count)
    ]


def draws_of_one(
    prefixes: Sequence[tuple[int, ...]], sampling: SamplingParams, draws: int, seed: int | None
) -> list[Request]:
    """`draws` single tokens after each prefix, so many to a request; seeds of requests lie further apart than those."""
    requests = []
    for number, ids in enumerate(prefix for prefix in prefixes for _ in range(0, draws, DRAWS_PER_REQUEST)):
        params = msgspec.structs.replace(
            sampling,
            n=min(draws, DRAWS_PER_REQUEST),
            seed=None if seed is None else _seed(seed + DRAWS_PER_REQUEST * (number + 1)),
            max_tokens=1,
            min_tokens=0,
            ignore_eos=False,
            logprobs=0,
            prompt_logprobs=None,
        )
        requests.append(Request(Prompt(ids), params))
    return requests


def singly(request: Request) -> list[Request]:
    """One request for each of its samples, with the seeds that engines give them."""
    sampling = request.sampling
    seeds = [None if sampling.seed is None else _seed(sampling.seed + index) for index in range(sampling.n)]
    return [Request(request.prompt, msgspec.structs.replace(sampling, n=1, seed=seed)) for seed in seeds]


def _seed(number: int) -> int:
    """Seeds go round at the end of their range."""
    return number % (MAX_SEED + 1)
