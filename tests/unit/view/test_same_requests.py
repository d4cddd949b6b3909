from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from zerodrift.core.completion import Completion, FinishReason, LogprobKind, Problem
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.records.codec import LineWriter
from zerodrift.records.directory import ROLLOUTS
from zerodrift.records.rollout import Rollout
from zerodrift.view.comparison import SameRequests, same_requests

Answered = tuple[Sequence[int], Sequence[float]]
Write = Callable[..., Path]


def rollout(index: int, answer: Answered | None, *, prompt: tuple[int, ...] = (1,), seed: int = 0) -> Rollout:
    sampling = SamplingParams(seed=seed)
    request = Request(Prompt(prompt), sampling)
    if answer is None:
        problem = Problem("engine/bad-answer", "nothing")
        return Rollout(index=index, group="parity", request=request, problem=problem)
    tokens, logprobs = answer
    completion = Completion(
        prompt_token_ids=prompt,
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        kind=LogprobKind.PROCESSED,
        sampling=sampling,
        finish_reason=FinishReason.LENGTH,
        versions=(VersionSpan(WeightVersion("a"), 0, len(tokens)),),
        fingerprint="x",
    )
    return Rollout(index=index, group="parity", request=request, completion=completion)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def run(name: str, *rollouts: Rollout) -> Path:
        (tmp_path / name).mkdir()
        with LineWriter[Rollout](tmp_path / name / ROLLOUTS) as writer:
            writer.write(*rollouts)
        return tmp_path / name

    return run


def test_the_same_answers(write: Write) -> None:
    answers = [rollout(0, ((5, 6), (-1.0, -2.0))), rollout(1, ((7,), (-0.5,)), seed=1)]
    found = same_requests(write("a", *answers), write("b", *reversed(answers)))
    assert found == SameRequests(
        samples=2, same_tokens=2, shared_tokens=3, differing=0, largest=0.0, mean=0.0
    )


def test_answers_that_part_are_compared_up_to_there(write: Write) -> None:
    one = write("a", rollout(0, ((5, 6, 7), (-1.0, -2.0, -3.0))), rollout(1, ((8,), (-1.0,))))
    other = write("b", rollout(0, ((5, 6, 9), (-1.0, -2.5, -4.0))), rollout(1, ((8,), (-1.0,))))
    found = same_requests(one, other)
    assert found == SameRequests(
        samples=2, same_tokens=1, shared_tokens=3, differing=1, largest=0.5, mean=0.5 / 3
    )
    longer = write("c", rollout(0, ((5, 6, 7, 8), (-1.0, -2.0, -3.0, -1.0))))
    found = same_requests(one, longer)
    assert found == SameRequests(
        samples=1, same_tokens=0, shared_tokens=3, differing=0, largest=0.0, mean=0.0
    )


@pytest.mark.parametrize(
    "other",
    [
        rollout(1, ((5,), (-1.0,))),
        rollout(0, ((5,), (-1.0,)), prompt=(2,)),
        rollout(0, ((5,), (-1.0,)), seed=1),
        rollout(0, None),
    ],
    ids=["another place", "another prompt", "another seed", "no answer"],
)
def test_other_requests_are_not_compared(write: Write, tmp_path: Path, other: Rollout) -> None:
    assert same_requests(tmp_path, tmp_path) is None, "it kept none"
    assert same_requests(write("a", rollout(0, ((5,), (-1.0,)))), write("b", other)) is None
