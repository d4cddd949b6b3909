"""Record the reference once, to audit against it anywhere and for as long as the weights stay the same."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion, LogprobKind
from zerodrift.core.errors import (
    ContractViolation,
    DigestMismatch,
    InvalidPrompt,
    InvalidSampling,
    RecordError,
)
from zerodrift.core.request import MAX_SEED, Prompt, Request, SamplingParams
from zerodrift.records.baseline import BaselineHeader, BaselineRow, read_header, read_rows
from zerodrift.records.codec import LineWriter, drop_torn_line
from zerodrift.records.lock import only_writer

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
    _check(reference, prompts, sampling)
    header = _header(reference, prompts, sampling)
    with _open(path) as writer, only_writer(path.with_name(f"{path.name}.lock"), path):
        done = _resume(path, header)
        before = len(done)
        if path.stat().st_size == 0:
            writer.write(header)
        for begin in range(0, len(prompts), BATCH):
            block = range(begin, min(begin + BATCH, len(prompts)))
            if not done.issuperset(block):
                rows = _rows(reference, prompts, sampling, block)
                writer.write(*(row.sealed(header.weights) for row in rows if row.index not in done))
                done.update(block)
                progress(len(done), len(prompts))
    return len(done) - before


def _rows(
    reference: ReferenceBackend, prompts: Sequence[Prompt], sampling: SamplingParams, block: range
) -> list[BaselineRow]:
    """A block is made as a whole, also where a kill left some of its rows behind.

    The last bits of a row depend on its neighbours in the batch, and a resumed recording must be the one that was
    never interrupted.
    """
    requests = [Request(prompts[index], _sampling_of(index, sampling)) for index in block]
    completions = [answer.completions[0] for answer in reference.generate(requests)]
    scores = reference.score([completion.sequence for completion in completions])
    return [_row(*made) for made in zip(block, completions, scores, strict=True)]


def _check(reference: ReferenceBackend, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
    """What cannot be recorded is refused before the file is touched."""
    if reference.kind is not LogprobKind.PROCESSED:
        raise ContractViolation(
            f"a baseline keeps processed logprobs, and this reference reports {reference.kind} ones; "
            "raw ones are recorded beside them in any case"
        )
    if sampling.n != 1:
        raise InvalidSampling(
            f"n is {sampling.n}; a baseline keeps one sample of each prompt: repeat the prompts"
        )
    if sampling.seed is None:
        raise InvalidSampling("the seed is None; give one, so that the recording can be repeated")
    if not prompts:
        raise InvalidPrompt("there is no prompt to record; give at least one")
    sampling.check_vocabulary(reference.facts.vocab_size)
    for number, prompt in enumerate(prompts):
        prompt.check_vocabulary(reference.facts.vocab_size)
        if len(prompt.token_ids) + sampling.max_tokens > reference.max_model_len:
            raise InvalidPrompt(
                f"prompt {number} has {len(prompt.token_ids)} tokens, and max_tokens={sampling.max_tokens} more do not "
                f"fit into a context of {reference.max_model_len}; shorten one of the two"
            )


def _open(path: Path) -> LineWriter[BaselineHeader | BaselineRow]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return LineWriter(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be written ({error.strerror}); choose another --out") from error


def _sampling_of(index: int, sampling: SamplingParams) -> SamplingParams:
    """Row i has seed + i; seeds go round at the end of their range."""
    return msgspec.structs.replace(sampling, seed=(cast("int", sampling.seed) + index) % (MAX_SEED + 1))


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
        count=len(prompts),
        sampling=sampling,
        reference=reference.fingerprint(),
    )


def _resume(path: Path, header: BaselineHeader) -> set[int]:
    """Indices that are there already. A file that is not this recording is left as it is."""
    if _begins_anew(path, header):
        return set()
    known = read_header(path)
    parts = {
        part: (getattr(known, part), getattr(header, part)) for part in ("weights", "prompts", "sampling")
    }
    # A row's last bits depend on how it was computed: half a file by another library would be two baselines.
    parts["numerics"] = (dict(known.reference.numeric), dict(header.reference.numeric))
    for part, (was, now) in parts.items():
        if was != now:
            raise DigestMismatch(
                f"{path} was recorded with other {part} ({was}) than asked for now "
                f"({now}); choose another file, or repeat the options it was made with"
            )
    drop_torn_line(path)
    return {row.index for row in read_rows(path)}


def _begins_anew(path: Path, header: BaselineHeader) -> bool:
    """The file holds nothing, or the beginning of this very header and no more, as after a kill."""
    line = msgspec.json.encode(header) + b"\n"
    with path.open("rb") as file:
        start = file.readline(len(line))
    if start.endswith(b"\n"):
        return False
    if not line.startswith(start):
        raise RecordError(f"{path} is not the beginning of this baseline; choose another file, or delete it")
    drop_torn_line(path)
    return True
