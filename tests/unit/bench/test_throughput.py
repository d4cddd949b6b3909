"""Ratios are arithmetic on times that these contenders make up."""

import math
from collections.abc import Sequence

import pytest

from zerodrift.bench.throughput import Job, Run, Served, Spread, Standing, check, compare, mixed
from zerodrift.core.errors import BadAnswer, InvalidValue, InvariantBroken

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
        seconds = next(self._times)
        return Run(seconds, seconds / 2, [served(job, logprob) for job in jobs])

    def close(self) -> None: ...


def compared(*contenders: Fake) -> tuple[Standing, ...]:
    return compare(contenders, JOBS, 3, lambda _done, _total: None)


def test_turns_are_taken_and_ratios_are_within_a_round() -> None:
    turns: list[str] = []
    # The machine slows down threefold in the last round, for both: the ratio of medians would be 2.
    exact, other = compared(Fake("exact", [1, 2, 3], turns), Fake("vllm", [4, 4, 12], turns))
    assert turns == ["exact", "vllm"] * 3
    assert exact.tokens_per_second == (TOKENS / 1, TOKENS / 2, TOKENS / 3)
    assert exact.speed == Spread(TOKENS / 2, TOKENS / 3, TOKENS / 1)
    assert exact.ratio is None
    assert other.ratio == other.processor_ratio == Spread(4, 2, 4)
    assert other.processor_seconds == (2, 2, 6)
    (alone,) = compared(Fake("vllm", [1, 1, 1], []))
    assert (alone.ratio, alone.processor_ratio) == (None, None)


def test_other_bits_in_another_round_are_a_bug() -> None:
    with pytest.raises(InvariantBroken):
        compared(Fake("exact", [1, 1, 1], [], drifts=True))
    compared(Fake("vllm", [1, 1, 1], [], drifts=True))


@pytest.mark.parametrize(
    "wrong",
    [
        [served(JOBS[0])],
        [served(JOBS[0]), Served((1,), (-1.0,))],
        [served(JOBS[0]), served(JOBS[1], math.nan)],
        [served(JOBS[0], 0.5), served(JOBS[1])],
    ],
)
def test_nobody_is_fast_by_doing_less(wrong: list[Served]) -> None:
    check("somebody", JOBS, Run(1, 1, [served(job) for job in JOBS]))
    with pytest.raises(BadAnswer):
        check("somebody", JOBS, Run(1, 1, wrong))


def test_the_same_requests_every_time_and_all_lengths_among_them() -> None:
    jobs = mixed(400, 100, 512)
    assert mixed(3, 100, 512) == jobs[:3]
    for lengths in ([len(job.prompt) for job in jobs], [job.num_tokens for job in jobs]):
        assert 16 <= min(lengths) < 20
        assert 250 < max(lengths) <= 256
        assert len(set(lengths)) > 150
    assert {token for job in jobs for token in job.prompt} == set(range(100))
    for job, short in zip(jobs, mixed(400, 100, 512, 20), strict=True):
        assert short == Job(job.prompt[: max(1, len(job.prompt) // 20)], max(1, job.num_tokens // 20))
    for count, context in ((0, 512), (1, 511)):
        with pytest.raises(InvalidValue):
            mixed(count, 100, context)
