"""Ratios are arithmetic on times that these contenders make up."""

import math
from collections.abc import Sequence

import pytest

from zerodrift.bench.contender import Run, Served, Stopwatch, Time, check, fastest
from zerodrift.bench.throughput import Setup, Spread, Throughput, compare
from zerodrift.bench.workload import Job, mixed
from zerodrift.core.errors import BadAnswer, InvariantBroken

JOBS = mixed(2, 61, 512)
TOKENS = sum(job.num_tokens for job in JOBS)


def served(job: Job, logprob: float = -1.0) -> Served:
    return Served((1,) * job.num_tokens, (logprob,) * job.num_tokens)


class Fake:
    """Takes the times that it is told, and says when it is asked."""

    setting = "made up"

    def __init__(self, name: str, times: Sequence[float], turns: list[str], drifts: bool = False) -> None:
        self.name, self._times, self._turns, self._drifts = name, iter(times), turns, drifts

    def run(self, jobs: Sequence[Job]) -> Run:
        self._turns.append(self.name)
        logprob = -1.0 - self._drifts * len(self._turns)
        clock = next(self._times)
        return Run(Time(clock, clock / 2), [served(job, logprob) for job in jobs])

    def close(self) -> None: ...


def compared(*contenders: Fake, rounds: int = 3) -> Throughput:
    setup = Setup(model="m", threads=1, rounds=rounds)
    return compare(contenders, JOBS, setup, lambda _done, _total: None)


def test_turns_are_taken_and_ratios_are_within_a_round() -> None:
    turns: list[str] = []
    # The machine slows down threefold in the last round, for both: the ratio of medians would be 2.
    found = compared(Fake("exact", [1, 2, 3], turns), Fake("transformers", [4, 4, 12], turns))
    assert turns == ["exact", "transformers"] * 3
    exact, other = found.standings
    assert exact.tokens_per_second == (TOKENS / 1, TOKENS / 2, TOKENS / 3)
    assert exact.speed == Spread(TOKENS / 2, TOKENS / 3, TOKENS / 1)
    assert (exact.ratio, exact.target, exact.exact_is_times_as_fast) == (None, None, ())
    assert other.exact_is_times_as_fast == (4, 2, 4)
    assert other.ratio == other.processor_ratio == Spread(4, 2, 4)
    assert other.target == 3
    assert other.processor_seconds == (2, 2, 6)
    assert (found.requests, found.rounds, found.output_tokens) == (2, 3, TOKENS)


def test_without_the_exact_engine_there_is_nothing_to_compare_with() -> None:
    (only,) = compared(Fake("vllm", [1, 1, 1], [])).standings
    assert (only.ratio, only.processor_ratio, only.target) == (None, None, None)


def test_other_bits_in_another_round_are_a_bug() -> None:
    with pytest.raises(InvariantBroken):
        compared(Fake("exact", [1, 1, 1], [], drifts=True))
    compared(Fake("transformers", [1, 1, 1], [], drifts=True))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([served(JOBS[0])], "answered 1 of 2 requests"),
        ([served(JOBS[0]), Served((1,), (-1.0,))], "gave 1 tokens and 1 logprobs for request 1"),
        ([served(JOBS[0]), served(JOBS[1], math.nan)], "request 1 a logprob that is none"),
        ([served(JOBS[0], 0.5), served(JOBS[1])], "request 0 a logprob that is none"),
    ],
)
def test_nobody_is_fast_by_doing_less(wrong: list[Served], says: str) -> None:
    with pytest.raises(BadAnswer, match=says):
        check("somebody", JOBS, Run(Time(1, 1), wrong))


def test_the_fastest_by_processor_time() -> None:
    assert fastest([("a", Time(1, 3)), ("b", Time(9, 2)), ("c", Time(5, 4))]) == "b"


def test_a_stopwatch_runs() -> None:
    watch = Stopwatch()
    assert sum(range(10**6)) > 0
    taken = watch.read()
    assert taken.clock > 0
    assert taken.processor > 0
