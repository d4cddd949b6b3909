"""transformers' own `generate` as a contender, at the batch size that suits it best.

Requests are sorted by output length, since a batch goes on until its longest member ends. Logprobs are taken from
the scores of each step: `compute_transition_scores` would first stack all of them, gigabytes more for the same numbers.
Shapes: B rows of a batch, V vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from zerodrift.bench.contender import SEARCH_DIVISOR, Run, Served, Stopwatch, Time, fastest
from zerodrift.bench.workload import Job, shortened

NAME = "transformers"
BATCH_SIZES = (8, 16, 32, 64)


class GenerateContender:
    """A vanilla model. Rows that are done are computed on beside the others, as `generate` does it."""

    name = NAME

    def __init__(self, model: Any, jobs: Sequence[Job]) -> None:
        """Tries the batch sizes on shortened `jobs`."""
        # What a call leaves open, `generate` fills in from the model's own configuration, its end of sequence too.
        self._model = copy.copy(model)
        self._model.generation_config = GenerationConfig()
        short = shortened(jobs, SEARCH_DIVISOR)
        self._serve(short[:2], 2)
        sizes = [size for size in BATCH_SIZES if size <= len(jobs)] or [len(jobs)]
        self._batch_size = fastest((size, self._timed(short, size)) for size in sizes)
        self.setting = f"batches of {self._batch_size}, tried {', '.join(map(str, sizes))}"

    def run(self, jobs: Sequence[Job]) -> Run:
        """All batches, one after another."""
        watch = Stopwatch()
        served = self._serve(jobs, self._batch_size)
        return Run(watch.read(), served)

    def close(self) -> None:
        """Nothing outlives the object."""

    def _timed(self, jobs: Sequence[Job], batch_size: int) -> Time:
        watch = Stopwatch()
        self._serve(jobs, batch_size)
        return watch.read()

    @torch.inference_mode()
    def _serve(self, jobs: Sequence[Job], batch_size: int) -> list[Served]:
        order = sorted(
            range(len(jobs)), key=lambda number: (jobs[number].num_tokens, len(jobs[number].prompt))
        )
        served: dict[int, Served] = {}
        for begin in range(0, len(order), batch_size):
            members = order[begin : begin + batch_size]
            served |= zip(members, self._batch([jobs[number] for number in members]), strict=True)
        return [served[number] for number in range(len(jobs))]

    def _batch(self, jobs: Sequence[Job]) -> list[Served]:
        longest = max(len(job.prompt) for job in jobs)
        ids = torch.zeros(len(jobs), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        output = self._model.generate(
            ids,
            attention_mask=mask,
            generation_config=_sampled(max(job.num_tokens for job in jobs)),
        )
        tokens_B = output.sequences[:, longest:]
        logprobs = torch.stack(
            [
                scores_BV.log_softmax(-1).gather(-1, tokens_B[:, step : step + 1])[:, 0]
                for step, scores_BV in enumerate(output.scores)
            ],
            dim=1,
        )
        return [
            Served(tuple(tokens[: job.num_tokens]), tuple(values[: job.num_tokens]))
            for job, tokens, values in zip(jobs, tokens_B.tolist(), logprobs.tolist(), strict=True)
        ]


def _sampled(num_tokens: int) -> GenerationConfig:
    # No end of sequence, so that nothing stops early; temperature 1 over the whole vocabulary, as the others.
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
