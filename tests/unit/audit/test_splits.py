"""Whole audits of engines that are wrong for some tokens or requests alone, beside such as are wrong for all or none."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.audit.run import Audit, Audited
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import CauseFound, Outcome

SHORT, LONG = (3, 44), (96, 150)
TOKENS = 16
Where = Callable[[Completion, int], bool]


class WrongSomewhere(FaultyBackend):
    """What it reports is off by as much as rounding to bf16 would make it, at the places that are told."""

    def __init__(self, inner: ReferenceBackend, where: Where) -> None:
        super().__init__(inner)
        self._where = where

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return [
            Answer(tuple(map(self._told, answer.completions)), answer.problems, answer.stream_deltas)
            for answer in super().generate(requests)
        ]

    def _told(self, completion: Completion) -> Completion:
        noise = np.random.default_rng(list(completion.token_ids)).normal(0, 0.02, len(completion.token_ids))
        values = [
            min(0.0, value + float(noise[place])) if self._where(completion, place) else value
            for place, value in enumerate(completion.logprobs)
        ]
        return msgspec.structs.replace(completion, logprobs=tuple(values))


@pytest.fixture
def audited(llama: ReferenceBackend, tmp_path: Path) -> Callable[..., Audited]:
    def run(engine: Any, precision: Precision = Precision.FP32, seed: int = 11) -> Audited:
        rng = np.random.default_rng(seed)
        lengths = [*rng.integers(*SHORT, 44), *LONG]
        prompts = [
            Prompt(tuple(rng.integers(4, 500, length).tolist())) for length in rng.permutation(lengths)
        ]
        return Audit(
            engine=engine,
            reference=llama,
            prompts=prompts,
            sampling=SamplingParams(temperature=0.8, max_tokens=TOKENS),
            validation=ValidationConfig(num_prompts=46, equivalence_trials=48, max_tokens=TOKENS),
            precision=precision,
            directory=tmp_path,
        ).run()

    return run


def principal(audited: Audited) -> CauseFound:
    assert audited.record.verdict is Outcome.FAIL
    return next(cause for cause in audited.record.causes if cause.gating)


def at_position(place: int) -> Where:
    return lambda completion, index: len(completion.prompt_token_ids) + index >= place


def with_prompts_of(length: int) -> Where:
    return lambda completion, index: len(completion.prompt_token_ids) >= length


def test_a_position_that_no_output_crosses_is_asked_for_and_named(
    audited: Callable[..., Audited], llama: ReferenceBackend
) -> None:
    named = principal(audited(WrongSomewhere(llama, at_position(77))))
    assert named.cause == "path/context-boundary", named.evidence
    print(named)


def test_a_length_of_prompts_is_no_position(audited: Callable[..., Audited], llama: ReferenceBackend) -> None:
    named = principal(audited(WrongSomewhere(llama, with_prompts_of(70))))
    print(named)
    assert named.cause == "unexplained"
    assert "prompts of" in named.evidence
