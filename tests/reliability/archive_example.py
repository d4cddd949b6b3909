"""An archive to try things on: `archive_example.py DIR`. Six steps at temperature 0.7, of which one side is wrong from step 3 on.

The wrong side reports raw logprobs, those before the temperature: what vLLM does unless it is told otherwise.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import LogprobKind
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.archive.layout import ArchiveSettings
from zerodrift.records.archive.writer import Archive
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans

MODEL = "testbed:llama"
STEPS, PER_STEP, BAD_FROM = 6, 5, 3
SAMPLING = SamplingParams(temperature=0.7, max_tokens=20)


class Sampled(NamedTuple):
    """A rollout at temperature 0.7 with the numbers it should have and those of raw logits."""

    step: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    right: tuple[float, ...]
    raw: tuple[float, ...]

    def numbers(self, *, good: bool) -> tuple[float, ...]:
        return self.right if good or self.step < BAD_FROM else self.raw


def sample() -> list[Sampled]:
    requests = [
        Request(Prompt((0, 5 + number, 40)), SamplingParams(temperature=0.7, max_tokens=20, seed=number))
        for number in range(PER_STEP * STEPS)
    ]
    right = ReferenceBackend(MODEL, dtype="float32").generate(requests)
    raw = ReferenceBackend(MODEL, dtype="float32", kind=LogprobKind.RAW).generate(requests)
    made = []
    for number, (request, one, other) in enumerate(zip(requests, right, raw, strict=True)):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        output = one.completions[0].token_ids
        numbers = one.completions[0].logprobs, other.completions[0].logprobs
        made.append(Sampled(number // PER_STEP, request.prompt.token_ids, output, *numbers))
    return made


def write(sampled: Sequence[Sampled], directory: Path, guilty: str = "engine") -> None:
    """An archive of them; `guilty` is the side that is wrong."""
    with Archive(directory, ArchiveSettings(healthy_one_in=1)) as archive:
        for step in range(STEPS):
            rollouts = tuple(
                ArchivedRollout(
                    id=f"{step}/{number}",
                    prompt_token_ids=rollout.prompt,
                    token_ids=rollout.output,
                    behavior_logprobs=tuple(rollout.numbers(good=guilty != "engine")),
                    old_logprobs=tuple(rollout.numbers(good=guilty != "trainer")),
                    versions=version_spans([step] * len(rollout.output)),
                    environment="sums",
                    replica=f"vllm-{number % 2}",
                    sampling=SAMPLING,
                    stated=("temperature",),
                )
                for number, rollout in enumerate(each for each in sampled if each.step == step)
            )
            bad = step >= BAD_FROM
            archive.append(
                ArchivedBatch(
                    step=step,
                    state=BatchState.QUARANTINE if bad else BatchState.OK,
                    reasons=("mismatch above its gate",) if bad else (),
                    trainer_version=str(step),
                    rollouts=rollouts,
                )
            )


if __name__ == "__main__":
    write(sample(), Path(sys.argv[1]))
