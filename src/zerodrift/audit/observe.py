"""Ask the engine, and keep every answer on disk before the next question: a killed run goes on where it was."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from zerodrift.audit.checked_calls import generated
from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer, Problem
from zerodrift.core.errors import BadAnswer, RecordError
from zerodrift.core.request import Request
from zerodrift.records.codec import LineWriter, drop_torn_line, read_lines, write_atomically
from zerodrift.records.rollout import Rollout

BATCH = 32
"""Requests in flight together, and the most that a kill can lose."""


def observe(
    engine: Backend,
    requests: Sequence[Request],
    group: str,
    path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    source: str = "engine",
) -> list[Rollout]:
    """Every rollout of the plan, from the file where it is there already and from the engine where not."""
    ids: dict[int, int] = {}
    rollouts = [_shared(each, requests[each.index], ids) for each in _resume(path, requests, group)]
    if rollouts:
        _check_same_engine(path, rollouts, engine.fingerprint().digest)
    known = {rollout.index for rollout in rollouts}
    open_requests = [(index, request) for index, request in enumerate(requests) if index not in known]
    with LineWriter[Rollout](path) as writer:
        for begin in range(0, len(open_requests), BATCH):
            part = open_requests[begin : begin + BATCH]
            answers = generated(engine, [request for _, request in part])
            fresh = [
                rollout
                for (index, request), answer in zip(part, answers, strict=True)
                for rollout in _rollouts(index, group, request, answer, source)
            ]
            writer.write(*fresh)
            rollouts += [_shared(each, each.request, ids) for each in fresh]
            progress(len(known) + begin + len(part), len(requests))
    return sorted(rollouts, key=lambda rollout: rollout.index)


def _resume(path: Path, requests: Sequence[Request], group: str) -> list[Rollout]:
    if not path.exists():
        return []
    _check_ours(path)
    drop_torn_line(path)
    rollouts = [rollout for rollout in _drop_partial(path) if rollout.group == group]
    for rollout in rollouts:
        if rollout.index >= len(requests) or requests[rollout.index] != rollout.request:
            raise RecordError(
                f"{path} holds rollouts of another plan (request {rollout.index} differs); "
                "resume with the same configuration, or choose another --out"
            )
    return rollouts


def _check_same_engine(path: Path, rollouts: Sequence[Rollout], fingerprint: str) -> None:
    """A verdict speaks of one engine."""
    seen = {rollout.completion.fingerprint for rollout in rollouts if rollout.completion is not None}
    if others := seen - {fingerprint}:
        raise RecordError(
            f"{path} holds answers of an engine with fingerprint {min(others)}, and this one has {fingerprint}; "
            "resume with the engine as it was, or choose another --out"
        )


def _check_ours(path: Path) -> None:
    """A file of somebody else must not lose its last line for having no newline."""
    begin = b'{"index":'
    with path.open("rb") as file:
        start = file.read(len(begin))
    if start != begin[: len(start)]:
        raise RecordError(f"{path} holds no rollouts of ours; choose another --out, or move it away")


def _drop_partial(path: Path) -> list[Rollout]:
    """All rollouts of requests that are there with every sample; the others leave the file, to be asked again.

    A kill may fall between two samples of one request, and what it leaves behind then are whole lines.
    """
    rollouts = list(read_lines(path, Rollout))
    samples = Counter((rollout.group, rollout.index) for rollout in rollouts)
    whole = [each for each in rollouts if samples[each.group, each.index] >= each.request.sampling.n]
    if len(whole) < len(rollouts):
        write_atomically(path, b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in whole))
    return whole


def _rollouts(index: int, group: str, request: Request, answer: Answer, source: str) -> list[Rollout]:
    good = [
        Rollout(index=index, group=group, request=request, completion=completion, source=source)
        for completion in answer.completions
    ]
    # A sample that nobody mentions is a problem too: as many rollouts as samples were asked for, or more.
    missing = request.sampling.n - len(answer.completions) - len(answer.problems)
    lost = Problem(BadAnswer.code, f"{missing} of {request.sampling.n} samples did not come back")
    problems = [*answer.problems, *[lost] * missing]
    bad = [
        Rollout(index=index, group=group, request=request, problem=problem, source=source)
        for problem in problems
    ]
    return good + bad


def _shared(rollout: Rollout, request: Request, ids: dict[int, int]) -> Rollout:
    """The same rollout, which holds no id or prompt twice that others hold: each id that is read takes 32 bytes.

    `request` is the plan's own, and `ids` are the token ids that were seen so far.
    """
    completion = rollout.completion
    if completion is not None:
        prompt, seen = request.prompt.token_ids, completion.prompt_token_ids
        completion = msgspec.structs.replace(
            completion,
            prompt_token_ids=prompt if seen == prompt else seen,
            token_ids=tuple(map(ids.setdefault, completion.token_ids, completion.token_ids)),
        )
    return msgspec.structs.replace(rollout, request=request, completion=completion)
