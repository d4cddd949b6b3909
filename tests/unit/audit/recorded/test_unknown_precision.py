"""Nobody said in which precision the numbers were computed: what do they show, and what may be concluded then?"""

import copy

import msgspec
import numpy as np
import pytest
import torch

from zerodrift.audit.blame import Blamed
from zerodrift.audit.perturb import _move
from zerodrift.audit.recorded.search import ASK_PREVIOUS
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome, Probe

MODEL = "testbed:llama"
Rollouts = list[RecordedRollout]
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def slightly_off():
    """Weights that are half a percent of each tensor's spread away, in fp32: as far as bf16 rounds."""
    backend = ReferenceBackend(MODEL, dtype="float32", batch=32)
    with torch.no_grad():
        _move(backend.model, copy.deepcopy(backend.model), 1, 0.005, torch.float32)
    return backend


@pytest.fixture(scope="module")
def in_bf16():
    return ReferenceBackend(MODEL, dtype="bfloat16", batch=32)


def prompts(count: int = 24) -> list[tuple[int, ...]]:
    return [(0, 5 + number, 40, 7) for number in range(count)]


def with_trainer(rollouts: Rollouts, trainer: ReferenceBackend) -> Rollouts:
    scores = trainer.score([each.prompt + each.output for each in rollouts])
    return [
        replace(each, trainer_logprobs=tuple(score[len(each.prompt) - 1 :]))
        for each, score in zip(rollouts, scores, strict=True)
    ]


def status(blamed: Blamed, probe: Probe) -> Outcome:
    return next(each.status for each in blamed.record.probes if each.name == probe)


def test_a_small_difference_is_not_called_rounding(slightly_off, reference, sampled, judged):
    blamed = judged(sampled(slightly_off, prompts()), reference, reproduce="zerodrift blame d")
    assert (blamed.record.verdict, blamed.record.guilty) == (Outcome.INCONCLUSIVE, "unknown")
    assert status(blamed, Probe.PARITY) is Outcome.INCONCLUSIVE
    assert "--previous" in blamed.record.message
    assert [each.command for each in blamed.to_type] == [
        "zerodrift blame d --precision bf16",
        "zerodrift blame d --precision fp32",
    ]
    # A record has room for one, which never passes what is wrong.
    assert blamed.record.reproduce == "zerodrift blame d --precision fp32"


@pytest.mark.long
def test_what_nothing_explains_is_asked_about_with_older_weights(slightly_off, reference, sampled, judged):
    cause = judged(sampled(slightly_off, prompts()), reference, precision=Precision.FP32).record.causes[0]
    assert (cause.cause, cause.fix) == ("unexplained", ASK_PREVIOUS)


def test_a_trainer_in_fp32_does_not_tell_the_engine_s_precision(
    slightly_off, engine, reference, sampled, judged
):
    blamed = judged(with_trainer(sampled(slightly_off, prompts()), engine), reference)
    assert blamed.record.verdict is Outcome.INCONCLUSIVE
    assert (status(blamed, Probe.PARITY), status(blamed, Probe.TRAINER)) == (
        Outcome.INCONCLUSIVE,
        Outcome.PASS,
    )


@pytest.mark.long
def test_nor_does_the_engine_s_that_of_a_trainer(slightly_off, engine, reference, sampled, judged):
    blamed = judged(with_trainer(sampled(engine, prompts()), slightly_off), reference)
    assert (blamed.record.verdict, blamed.record.precision) == (Outcome.INCONCLUSIVE, "fp32")
    assert (status(blamed, Probe.PARITY), status(blamed, Probe.TRAINER)) == (
        Outcome.PASS,
        Outcome.INCONCLUSIVE,
    )


@pytest.mark.parametrize(
    ("said", "verdict"),
    [(None, Outcome.INCONCLUSIVE), (Precision.BF16, Outcome.PASS), (Precision.FP32, Outcome.FAIL)],
)
def test_rounding_passes_where_it_was_said_to_be_there(said, verdict, in_bf16, reference, sampled, judged):
    assert judged(sampled(in_bf16, prompts()), reference, precision=said).record.verdict is verdict


def test_numbers_that_were_written_in_bf16_say_so(in_bf16, reference, sampled, judged):
    written = [
        replace(each, logprobs=tuple(torch.tensor(each.logprobs).bfloat16().tolist()))
        for each in sampled(in_bf16, prompts())
    ]
    blamed = judged(written, reference)
    assert (blamed.record.verdict, blamed.record.precision) == (Outcome.PASS, "bf16")


@pytest.mark.parametrize("places", [3, 4])
def test_numbers_that_were_written_with_few_decimals(places, engine, reference, sampled, judged):
    cut = [
        replace(each, logprobs=tuple(round(value, places) for value in each.logprobs))
        for each in sampled(engine, prompts())
    ]
    blamed = judged(cut, reference)
    assert (blamed.record.verdict, blamed.record.precision) == (Outcome.PASS, "fp32")


def test_a_sound_dump_of_certainties_needs_no_precision(engine, reference, sampled, judged):
    """Nothing tells the precision where every logprob is about zero; what passes the strictest gates passes."""
    certain = SamplingParams(temperature=0.01, max_tokens=20)
    requests = [
        Request(Prompt(prompt), replace(certain, seed=number, ignore_eos=True))
        for number, prompt in enumerate(prompts())
    ]
    answers = [answer.completions[0] for answer in engine.generate(requests)]
    assert float(np.mean(np.abs([each.logprobs for each in answers]))) < 0.1
    rollouts = [
        replace(each, output=answer.token_ids, logprobs=answer.logprobs, sampling=certain)
        for each, answer in zip(sampled(engine, prompts()), answers, strict=True)
    ]
    blamed = judged(rollouts, reference)
    assert status(blamed, Probe.PARITY) is Outcome.PASS


def drawn_with(engine: ReferenceBackend, count: int, **sampling: float) -> Rollouts:
    """Rollouts that do not state how they were sampled."""
    requests = [
        Request(Prompt(prompt), SamplingParams(max_tokens=20, seed=number, ignore_eos=True, **sampling))
        for number, prompt in enumerate(prompts(count))
    ]
    return [
        RecordedRollout(
            source="d",
            line=number + 1,
            step=number // 6,
            prompt=request.prompt.token_ids,
            output=answer.completions[0].token_ids,
            logprobs=answer.completions[0].logprobs,
            sampling=SamplingParams(),
            stated=frozenset(),
        )
        for number, (request, answer) in enumerate(zip(requests, engine.generate(requests), strict=True))
    ]


@pytest.mark.parametrize(
    ("sampling", "typed"),
    [
        pytest.param({"top_p": 0.95}, "--top-p 0.95", marks=pytest.mark.long),
        ({"top_p": 0.9}, "--top-p 0.9"),
        ({"temperature": 0.9}, "--temperature 0.9"),
    ],
    ids=["within the gates of bf16", "above", "temperature"],
)
def test_a_parameter_that_nobody_stated_is_no_fault(sampling, typed, engine, reference, judged):
    blamed = judged(drawn_with(engine, 48, **sampling), reference, reproduce="zerodrift blame d")
    assert blamed.record.verdict is Outcome.INCONCLUSIVE
    assert blamed.record.precision == "fp32"
    assert blamed.record.reproduce == f"zerodrift blame d {typed}"


@pytest.mark.long
def test_nor_is_it_in_bf16(in_bf16, reference, judged):
    """Numbers that are coarser than what the parameter does to them cannot contradict it."""
    blamed = judged(drawn_with(in_bf16, 60, top_p=0.95), reference, precision=Precision.BF16)
    assert blamed.record.verdict is Outcome.INCONCLUSIVE
