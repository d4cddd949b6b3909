"""Whole audits of engines that are wrong for some tokens or requests alone, beside such as are wrong for all or none."""

import re
from collections.abc import Callable, Sequence

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
def audited(llama, tmp_path):
    def run(engine, precision=Precision.FP32, seed=11):
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


def edges(cause: CauseFound) -> list[int]:
    """Whole numbers of the evidence up to the first colon behind the split."""
    return [
        int(number) for number in re.findall(r"\d+", cause.evidence.partition("split: ")[2].partition(":")[0])
    ]


def test_a_position_that_no_output_crosses_is_asked_for_and_named(audited, llama):
    named = principal(audited(WrongSomewhere(llama, at_position(77))))
    assert named.cause == "path/context-boundary", named.evidence
    assert edges(named) == [77]
    assert named.explained == pytest.approx(1.0, abs=1e-3)


@pytest.mark.long
def test_a_length_of_prompts_is_no_position(audited, llama):
    named = principal(audited(WrongSomewhere(llama, with_prompts_of(70))))
    assert named.cause == "unexplained"
    low, high = edges(named)
    assert 44 < low <= 70 <= high < 96
    assert "precision" not in named.fix


@pytest.mark.long
def test_a_place_in_the_output_is_told(audited, llama):
    named = principal(audited(WrongSomewhere(llama, lambda completion, index: index >= 9)))
    assert (named.cause, edges(named)) == ("unexplained", [9])


@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.long), 0.1])
def test_what_is_wrong_everywhere_or_on_some_requests_by_chance_has_no_split(audited, llama, share):
    def where(completion, index):
        dice = np.random.default_rng(list(completion.prompt_token_ids))
        return not share or bool(dice.random() < share)

    verdict = audited(WrongSomewhere(llama, where)).record
    assert verdict.verdict is Outcome.FAIL
    assert not any("split:" in cause.evidence for cause in verdict.causes)


class Biased(FaultyBackend):
    """A bias on ids that nobody asked for."""

    def __init__(self, inner: ReferenceBackend, bias: dict[int, float]) -> None:
        super().__init__(inner)
        self._bias = bias

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        biased = [
            Request(each.prompt, msgspec.structs.replace(each.sampling, logit_bias=self._bias))
            for each in requests
        ]
        return super().generate(biased)


@pytest.mark.parametrize(
    ("ids", "size"), [((31, 77, 204), 0.35), pytest.param((9, 40), -0.6, marks=pytest.mark.long)]
)
def test_a_small_bias_on_few_ids_is_named_with_them(audited, llama, ids, size):
    named = principal(audited(Biased(llama, dict.fromkeys(ids, size))))
    assert named.cause == "semantic/logit-bias", named.evidence
    assert f"{size:+.3g} on {len(ids)} tokens ({', '.join(map(str, ids))})" in named.evidence
