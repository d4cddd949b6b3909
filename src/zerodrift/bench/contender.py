"""What takes part in a comparison: it serves all jobs at once, says how long it took, and proves that it did."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from zerodrift.bench.workload import Job
from zerodrift.core.errors import BadAnswer

SEARCH_DIVISOR = 8
"""Settings are chosen on requests an eighth as long: three choices then cost less than half a round."""
Choice = TypeVar("Choice")


class Served(NamedTuple):
    """One request's answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Time(NamedTuple):
    """How long something took."""

    clock: float
    """Seconds on the wall."""
    processor: float
    """Seconds of all threads and processes together: what a busy machine leaves comparable, if threads do not wait."""


class Stopwatch:
    """Runs from its making."""

    def __init__(self) -> None:
        self._clock, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> Time:
        """So far, in this process."""
        return Time(time.perf_counter() - self._clock, time.process_time() - self._processor)


class Run(NamedTuple):
    """All answers, in the order of jobs."""

    time: Time
    served: list[Served]


class Contender(Protocol):
    """One way of serving."""

    name: str
    setting: str
    """What was chosen for it, in words."""

    def run(self, jobs: Sequence[Job]) -> Run:
        """Serve everything, from requests in memory to answers in memory."""
        ...

    def close(self) -> None:
        """Let go of memory and processes."""
        ...


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


def fastest(timed: Iterable[tuple[Choice, Time]]) -> Choice:
    """The choice that took the least processor time: choices are tried once, and once is not enough for a clock."""
    return min(timed, key=lambda pair: pair[1].processor)[0]
