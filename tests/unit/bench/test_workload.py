import pytest

from zerodrift.bench.workload import Job, mixed, output_tokens, prompt_tokens, shortened
from zerodrift.core.errors import InvalidValue


def test_the_same_requests_every_time_and_all_lengths_among_them() -> None:
    jobs = mixed(400, 100, 512)
    assert jobs == mixed(400, 100, 512)
    assert jobs != mixed(400, 100, 512, seed=1)
    for lengths in ([len(job.prompt) for job in jobs], [job.num_tokens for job in jobs]):
        assert 16 <= min(lengths) < 20
        assert 250 < max(lengths) <= 256
        assert len(set(lengths)) > 150
    assert {token for job in jobs for token in job.prompt} == set(range(100))


def test_fewer_requests_are_the_first_of_more() -> None:
    assert mixed(3, 100, 512) == mixed(64, 100, 512)[:3]


def test_shortened_keeps_the_mixture() -> None:
    jobs = [Job(tuple(range(40)), 80), Job((1, 2), 3)]
    assert shortened(jobs, 8) == [Job((0, 1, 2, 3, 4), 10), Job((1,), 1)]
    assert (prompt_tokens(jobs), output_tokens(jobs)) == (42, 83)


def test_what_cannot_be_measured() -> None:
    with pytest.raises(InvalidValue):
        mixed(0, 100, 512)
    with pytest.raises(InvalidValue, match=r"511.*512"):
        mixed(1, 100, 511)
