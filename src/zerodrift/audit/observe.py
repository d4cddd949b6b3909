"""Ask the engine, and keep every answer on disk before the next question: a killed run goes on where it was."""

from collections.abc import Callable, Sequence
from pathlib import Path

from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer
from zerodrift.core.errors import RecordError
from zerodrift.core.request import Request
from zerodrift.records.codec import LineWriter, drop_torn_line, read_lines
from zerodrift.records.rollout import Rollout

BATCH = 32
"""Requests in flight together, and the most that a kill can lose."""


def observe(
    engine: Backend,
    requests: Sequence[Request],
    group: str,
    path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Rollout]:
    """Every rollout of the plan, from the file where it is there already and from the engine where not."""
    rollouts = _resume(path, requests, group)
    known = {rollout.index for rollout in rollouts}
    open_requests = [(index, request) for index, request in enumerate(requests) if index not in known]
    with LineWriter[Rollout](path) as writer:
        for begin in range(0, len(open_requests), BATCH):
            part = open_requests[begin : begin + BATCH]
            answers = engine.generate([request for _, request in part])
            fresh = [
                rollout
                for (index, request), answer in zip(part, answers, strict=True)
                for rollout in _rollouts(index, group, request, answer)
            ]
            writer.write(*fresh)
            rollouts += fresh
            progress(len(known) + begin + len(part), len(requests))
    return sorted(rollouts, key=lambda rollout: rollout.index)


def _resume(path: Path, requests: Sequence[Request], group: str) -> list[Rollout]:
    if not path.exists():
        return []
    drop_torn_line(path)
    rollouts = [rollout for rollout in read_lines(path, Rollout) if rollout.group == group]
    for rollout in rollouts:
        if rollout.index >= len(requests) or requests[rollout.index] != rollout.request:
            raise RecordError(
                f"{path} holds rollouts of another plan (request {rollout.index} differs); "
                "resume with the same configuration, or choose another --out"
            )
    return rollouts


def _rollouts(index: int, group: str, request: Request, answer: Answer) -> list[Rollout]:
    good = [
        Rollout(index=index, group=group, request=request, completion=completion)
        for completion in answer.completions
    ]
    bad = [Rollout(index=index, group=group, request=request, problem=problem) for problem in answer.problems]
    return good + bad
