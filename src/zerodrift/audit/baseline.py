"""Record the reference once, to audit against it anywhere and for as long as the weights stay the same."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion
from zerodrift.core.errors import DigestMismatch
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.baseline import BaselineHeader, BaselineRow, read_header, read_rows
from zerodrift.records.codec import LineWriter, drop_torn_line

BATCH = 32
"""Rows that are made, and put on the disk, together."""


def record(
    reference: ReferenceBackend,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Sample and score every prompt that `path` does not hold yet; returns how many rows are new."""
    header = _header(reference, prompts, sampling)
    done = _resume(path, header)
    todo = [index for index in range(len(prompts)) if index not in done]
    with LineWriter[BaselineHeader | BaselineRow](path) as writer:
        if path.stat().st_size == 0:
            writer.write(header)
        for begin in range(0, len(todo), BATCH):
            part = todo[begin : begin + BATCH]
            requests = [
                Request(prompts[index], msgspec.structs.replace(sampling, seed=(sampling.seed or 0) + index))
                for index in part
            ]
            completions = [answer.completions[0] for answer in reference.generate(requests)]
            scores = reference.score([completion.sequence for completion in completions])
            rows = zip(part, completions, scores, strict=True)
            writer.write(*(_row(index, completion, score) for index, completion, score in rows))
            progress(len(done) + begin + len(part), len(prompts))
    return len(todo)


def _row(index: int, completion: Completion, scores: list[float]) -> BaselineRow:
    return BaselineRow(
        index=index,
        prompt=completion.prompt_token_ids,
        output=completion.token_ids,
        logprobs=completion.logprobs,
        raw_logprobs=tuple(scores[len(completion.prompt_token_ids) - 1 :]),
    )


def _header(
    reference: ReferenceBackend, prompts: Sequence[Prompt], sampling: SamplingParams
) -> BaselineHeader:
    ids = msgspec.json.encode([prompt.token_ids for prompt in prompts])
    return BaselineHeader(
        model=str(reference.spec),
        weights=reference.version.digest or "",
        prompts=hashlib.sha256(ids).hexdigest()[:16],
        sampling=sampling,
        reference=reference.fingerprint(),
    )


def _resume(path: Path, header: BaselineHeader) -> set[int]:
    if not path.exists() or path.stat().st_size == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        return set()
    drop_torn_line(path)
    known = read_header(path)
    for part in ("weights", "prompts", "sampling"):
        if getattr(known, part) != getattr(header, part):
            raise DigestMismatch(
                f"{path} was recorded with other {part} ({getattr(known, part)}) than asked for now "
                f"({getattr(header, part)}); choose another file, or repeat the options it was made with"
            )
    return {row.index for row in read_rows(path)}
