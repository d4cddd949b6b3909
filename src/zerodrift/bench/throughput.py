"""Contenders side by side in one run, in turns: A B C, A B C, …

A machine's speed drifts by more than what is measured here, so a ratio is taken within each round, where both sides
met the same machine, and the median of the ratios is what counts. Where others compute on the same machine, the ratio of
processor times says more than that of the clock.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from zerodrift.core.errors import BadAnswer, InvalidValue, InvariantBroken

EXACT = "exact"
SHORTEST, LONGEST = 16, 256
"""Tokens of a prompt, and of an output: rollouts of a small task."""


class Job(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    num_tokens: int
    """Tokens to generate, whatever the model would rather do: all contenders do the same work."""


class Served(NamedTuple):
    """One request's answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Run(NamedTuple):
    """All answers, in the order of jobs, and how long they took."""

    seconds: float
    processor_seconds: float
    """Of all threads and processes together: what a busy machine leaves comparable, if threads do not wait."""
    served: list[Served]


class Contender(Protocol):
    """One way of serving."""

    name: str
    setting: str
    """What was chosen for it, in words."""

    def run(self, jobs: Sequence[Job]) -> Run:
        """Serve everything at once, from requests in memory to answers in memory."""
        ...

    def close(self) -> None:
        """Let go of memory and processes."""
        ...


class Spread(msgspec.Struct, frozen=True):
    """A number that was measured several times."""

    median: float
    low: float
    high: float


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How one contender did, each list with one number per round."""

    name: str
    setting: str
    tokens_per_second: tuple[float, ...]
    """Generated tokens."""
    processor_seconds: tuple[float, ...]
    speed: Spread
    ratio: Spread | None = None
    """How many times as fast the exact engine was; None for itself, and where it took no part."""
    processor_ratio: Spread | None = None
    """The same by processor time."""


def mixed(count: int, vocab_size: int, context: int, divisor: int = 1) -> list[Job]:
    """`count` requests, always the same, of random tokens, so that no two share a prefix; lengths over `divisor`."""
    if count < 1:
        raise InvalidValue(f"asked for {count} requests; a measurement needs one at least")
    if context < 2 * LONGEST:
        raise InvalidValue(
            f"the model's context of {context} is below the {2 * LONGEST} tokens of the longest request; "
            "choose a model with a longer one"
        )
    draw = random.Random(0)
    jobs = []
    for _ in range(count):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(draw.randint(SHORTEST, LONGEST)))
        num_tokens = draw.randint(SHORTEST, LONGEST)
        jobs.append(Job(prompt[: max(1, len(prompt) // divisor)], max(1, num_tokens // divisor)))
    return jobs


def compare(
    contenders: Sequence[Contender], jobs: Sequence[Job], rounds: int, progress: Callable[[int, int], None]
) -> tuple[Standing, ...]:
    """Every contender serves `jobs` once per round."""
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    total = rounds * len(contenders)
    for turn in range(total):
        contender = contenders[turn % len(contenders)]
        progress(turn, total)
        run = contender.run(jobs)
        check(contender.name, jobs, run)
        earlier = runs[contender.name]
        if contender.name == EXACT and earlier and run.served != earlier[0].served:
            raise InvariantBroken("the exact engine gave other bits in another round; please report it")
        earlier.append(run)
    progress(total, total)
    num_tokens = sum(job.num_tokens for job in jobs)
    return tuple(_standing(contender, runs, num_tokens) for contender in contenders)


def check(name: str, jobs: Sequence[Job], run: Run) -> None:
    """Nobody is fast by doing less: every answer has its tokens, and a logprob for each."""
    if len(run.served) != len(jobs):
        raise BadAnswer(f"{name} answered {len(run.served)} of {len(jobs)} requests")
    for number, (job, served) in enumerate(zip(jobs, run.served, strict=True)):
        tokens, logprobs = len(served.token_ids), len(served.logprobs)
        if not tokens == logprobs == job.num_tokens:
            raise BadAnswer(
                f"{name} gave {tokens} tokens and {logprobs} logprobs for request {number}, which asked for {job.num_tokens}"
            )
        if not all(math.isfinite(value) and value <= 0 for value in served.logprobs):
            raise BadAnswer(f"{name} gave request {number} a logprob that is none: NaN, infinite or positive")


def _standing(contender: Contender, runs: Mapping[str, Sequence[Run]], num_tokens: int) -> Standing:
    own = runs[contender.name]
    speeds = [num_tokens / run.seconds for run in own]
    exact = [] if contender.name == EXACT else runs.get(EXACT, [])
    rounds = list(zip(own, exact, strict=True)) if exact else []
    return Standing(
        name=contender.name,
        setting=contender.setting,
        tokens_per_second=tuple(speeds),
        processor_seconds=tuple(run.processor_seconds for run in own),
        speed=_spread(speeds),
        ratio=_spread([run.seconds / ours.seconds for run, ours in rounds]) if rounds else None,
        processor_ratio=_spread([run.processor_seconds / ours.processor_seconds for run, ours in rounds])
        if rounds
        else None,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
