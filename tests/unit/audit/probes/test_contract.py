from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from zerodrift import models
from zerodrift.audit.probes.contract import contract
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.core.completion import Completion, FinishReason, Problem
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.models.testbed_config import BOS_ID, EOS_ID
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import Outcome

FACTS = models.facts("testbed:llama")
Make = Callable[..., Completion]
SENT = (BOS_ID, 10, 11, 12)
OTHER = (BOS_ID, 20, 21)


def rollout(
    completion: Completion | None, index: int = 0, prompt: Sequence[int] = SENT, **sampling: Any
) -> Rollout:
    params = SamplingParams(**{"max_tokens": 2, **sampling})
    problem = None if completion is not None else Problem("engine/bad-answer", "torn")
    request = Request(Prompt(tuple(prompt)), params)
    return Rollout(index=index, group="parity", request=request, completion=completion, problem=problem)


def judge(*rollouts: Rollout, **facts: Any) -> ProbeResult:
    return contract(rollouts, "vllm", msgspec.structs.replace(FACTS, **facts), decode=text)


def text(ids: Sequence[int]) -> str:
    """Of the two tokens 11 and 12, and of 99 alone, the same."""
    return "".join({11: "ab", 12: "cd", 99: "abcd"}.get(each, f"<{each}>") for each in ids)


def causes(result: ProbeResult) -> list[str]:
    return [cause.cause for cause in result.causes]


def test_a_sound_answer_passes(completion):
    result = judge(rollout(completion(SENT)), rollout(completion(OTHER), 1, OTHER))
    assert result.record.status is Outcome.PASS
    assert result.record.required
    assert result.record.evidence == {"completions": 2, "unreadable": 0, "ended": 0}
    assert "how an end is told was not seen" in result.record.message
    assert result.causes == ()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_output_that_the_engine_broke_off_is_no_answer(completion, reason):
    result = judge(rollout(completion(SENT)), rollout(completion(OTHER, (), finish_reason=reason), 1, OTHER))
    assert result.record.status is Outcome.INCONCLUSIVE
    assert result.record.required
    assert "1 of 2 outputs were broken off" in result.record.message


def test_outputs_that_end_by_themselves_are_counted(completion):
    result = judge(rollout(completion(SENT, (4, EOS_ID), finish_reason=FinishReason.STOP)))
    assert result.record.evidence["ended"] == 1
    assert "1 ended before the limit" in result.record.message


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        ((BOS_ID, *SENT), "semantic/bos"),
        (SENT[1:], "semantic/bos"),
        (SENT[:-1], "semantic/template"),
        ((*SENT, 13), "semantic/template"),
        (OTHER, "semantic/misbound-output"),
        ((BOS_ID, 10, 99), "semantic/retokenised"),
        # Other ids of another text, as many as before or fewer: nobody encodes that.
        ((BOS_ID, 10, 98, 99), "unexplained"),
        ((BOS_ID, 11, 12), "unexplained"),
    ],
)
def test_a_prompt_seen_differently_is_classified_by_how(completion, seen, cause):
    rollouts = [rollout(completion(seen)), rollout(completion(OTHER), 1, OTHER)]
    result = judge(*rollouts)
    assert result.record.status is Outcome.FAIL
    assert causes(result) == [cause]
    assert result.causes[0].explained == 0.5
    assert "in 1 of 2 prompts" in result.record.message
    assert f"sent {len(SENT)} ids, saw {len(seen)}" in result.record.message


def test_without_a_bos_token_nothing_is_blamed_on_it(completion):
    assert causes(judge(rollout(completion((BOS_ID, *SENT))), bos_token_id=None)) == ["unexplained"]


@pytest.mark.parametrize(
    ("kept", "cause"), [(lambda ids: ids[:-1], "semantic/template"), (lambda ids: ids[:3], "unexplained")]
)
def test_a_template_ends_every_prompt_alike_and_a_limit_does_not(completion, kept, cause):
    prompts = [tuple(range(10, 10 + length)) for length in (5, 6, 9)]
    rollouts = [rollout(completion(kept(ids)), number, ids) for number, ids in enumerate(prompts)]
    assert causes(judge(*rollouts)) == [cause]


def test_most_prompts_decide_how_they_were_changed(completion):
    """Rotated outputs, the first of which happens to begin like the prompt it was handed to."""
    prompts = [(5,), (5, 6, 7), (8, 9), (10, 11, 12, 13), (14,)]
    rotated = [*prompts[1:], prompts[0]]
    result = judge(
        *(
            rollout(completion(seen), number, sent)
            for number, (sent, seen) in enumerate(zip(prompts, rotated, strict=True))
        )
    )
    assert causes(result) == ["semantic/misbound-output"]


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("value/non-finite", Outcome.FAIL, ["semantic/nonfinite"]),
        ("value/completion", Outcome.INCONCLUSIVE, []),
        ("engine/bad-answer", Outcome.INCONCLUSIVE, []),
    ],
)
def test_samples_that_cannot_be_read(completion, code, status, expected):
    bad = msgspec.structs.replace(rollout(None), problem=Problem(code, "logprobs[3] is nan"))
    result = judge(rollout(completion(SENT)), bad)
    assert result.record.status is status
    assert causes(result) == expected
    assert "1 of 2 samples" in result.record.message
    assert "logprobs[3] is nan" in result.record.message


def test_nothing_came_back():
    result = judge()
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert result.record.required


def pair(
    completion: Make, first: Sequence[int], second: Sequence[int], logprob: float = -6.0
) -> list[Rollout]:
    size = len(first)
    return [
        rollout(
            completion(SENT, output, (logprob,) * size, sample_index=number),
            prompt=SENT,
            n=2,
            max_tokens=size,
        )
        for number, output in enumerate((first, second))
    ]


def test_equal_samples_of_one_request_share_their_seed(completion):
    same, differ = (4, 5, 6, 7), (4, 5, 6, 8)
    assert causes(judge(*pair(completion, same, same))) == ["semantic/seed"]
    assert causes(judge(*pair(completion, same, differ))) == []
    # 4 tokens at 6 nats prove something; at 4 nats together they are chance.
    assert causes(judge(*pair(completion, same, same, -1.0))) == []


def test_equal_outputs_of_two_requests_are_no_matter(completion):
    rollouts = [rollout(completion(SENT, (4,) * 4, (-6.0,) * 4), index, max_tokens=4) for index in (0, 1)]
    assert causes(judge(*rollouts)) == []


def test_one_sample_left_of_two_says_nothing_of_seeds(completion):
    first, _ = pair(completion, (4,) * 4, (4,) * 4)
    assert causes(judge(first)) == []


@pytest.mark.parametrize(
    ("output", "reason", "sampling", "words"),
    [
        ((4, EOS_ID), FinishReason.STOP, {}, None),
        ((4,), FinishReason.STOP, {}, "hold no stop token"),
        ((), FinishReason.STOP, {}, "hold no stop token"),
        ((4,), FinishReason.STOP, {"stop": ("x",)}, None),
        ((4, 9), FinishReason.STOP, {"stop_token_ids": (9,)}, None),
        ((EOS_ID, 4), FinishReason.LENGTH, {}, "go on after a stop token"),
        ((EOS_ID, 4), FinishReason.LENGTH, {"ignore_eos": True}, None),
        ((9, 4), FinishReason.LENGTH, {"stop_token_ids": (9,)}, "go on after a stop token"),
        ((9, 4), FinishReason.LENGTH, {"stop_token_ids": (9,), "min_tokens": 1}, None),
        ((4,), FinishReason.LENGTH, {}, "another length"),
        ((4, 5, 6), FinishReason.LENGTH, {}, "another length"),
        ((4, 5, EOS_ID), FinishReason.STOP, {}, "another length"),
        ((4,), FinishReason.ABORT, {}, None),
    ],
)
def test_the_end_of_an_output_is_the_end_it_claims(completion, output, reason, sampling, words):
    result = judge(rollout(completion(SENT, output, finish_reason=reason), **sampling))
    # What loses or adds any token makes another length: that is no matter of stop tokens.
    named = "unexplained" if words == "another length" else "semantic/eos"
    assert causes(result) == ([] if words is None else [named])
    if words is not None:
        assert words in result.causes[0].evidence
        assert result.causes[0].gating
