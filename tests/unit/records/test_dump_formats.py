from typing import Any

import msgspec
import pytest

from zerodrift.core.completion import Completion, FinishReason, LogprobKind, Problem
from zerodrift.core.errors import InvalidCompletion, InvalidSampling, InvalidValue, NonFinite, RecordError
from zerodrift.core.request import SHAPING, Prompt, Request, SamplingParams
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.records.dump_fields import LinePlace
from zerodrift.records.dump_formats import (
    TRAINER_KEYS,
    DumpFormat,
    detect,
    read_own,
    read_plain,
    read_prime_rl,
)
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.rollout import Rollout

PLACE = LinePlace("dump.jsonl", 7, SamplingParams(temperature=0.7), frozenset({"temperature"}))
PLAIN: dict[str, Any] = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -1]}

# As prime-rl writes it: aligned lists over the whole sequence, null for what is absent or not finite.
PRIME_RL: dict[str, Any] = {
    "schema_version": 1,
    "step": 12,
    "rank": 0,
    "env_name": "gsm8k",
    "token_ids": [5, 6, 7, 8, 9, 10, 11],
    "loss_mask": [False, False, True, True, False, True, False],
    "inference_logprobs": [0.0, 0.0, -0.1, -0.2, 0.0, -0.3, 0.0],
    "trainer_logprobs": [-6.2, -1.0, -0.11, -0.21, -2.0, -0.31, None],
    **dict.fromkeys(("mismatch_kl", "rl_weights", "ce_weights", "ref_kl_weights"), [None] * 7),
}


def plain(**changes: Any) -> RecordedRollout:
    return read_plain({**PLAIN, **changes}, PLACE)[0]


def own(**changes: Any) -> dict[str, Any]:
    versions = [WeightVersion("3"), WeightVersion("4")]
    completion = Completion(
        prompt_token_ids=(0, 1, 2),
        token_ids=(3, 4),
        logprobs=(-0.5, -1.0),
        kind=LogprobKind.RAW,
        sampling=SamplingParams(),
        finish_reason=FinishReason.STOP,
        versions=(VersionSpan(versions[0], 0, 1), VersionSpan(versions[1], 1, 2)),
        fingerprint="f",
    )
    request = Request(Prompt((1, 2)), SamplingParams(top_p=0.9))
    fields = {"index": 0, "group": "parity", "request": request, "completion": completion, **changes}
    decoded = msgspec.json.decode(msgspec.json.encode(Rollout(**fields)))
    assert isinstance(decoded, dict)
    return decoded


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        (PLAIN, DumpFormat.PLAIN),
        ({"prompt_ids": [], "completion_ids": [], "logprobs": []}, DumpFormat.PLAIN),
        (PRIME_RL, DumpFormat.PRIME_RL),
        (own(), DumpFormat.ZERODRIFT),
        ({"prompt": "text", "completion": "text"}, None),
        ({"prompt_ids": [], "completion_ids": []}, None),
    ],
)
def test_formats_are_known_by_their_keys(fields, form):
    assert detect(fields) is form


def test_a_plain_line_with_the_least():
    rollout = plain()
    assert (rollout.prompt, rollout.output, rollout.logprobs) == ((1, 2), (3, 4), (-0.5, -1))
    assert (rollout.source, rollout.line) == ("dump.jsonl", 7)
    assert rollout.sampling.temperature == 0.7
    assert rollout.stated == {"temperature"}
    for name in ("step", "kind", "trainer_logprobs", "version", "model", "finish_reason"):
        assert getattr(rollout, name) is None


def test_a_plain_line_with_everything():
    rollout = plain(
        step=4,
        version=12,
        model="tiny",
        logprobs_mode="raw_logprobs",
        finish_reason="length",
        trainer_logprobs=[-0.4, -0.9],
        temperature=1.2,
        top_k=-1,
        top_p=None,
        sampling={"min_p": 0.1, "temperature": 1.2, "max_tokens": 9, "skip_special_tokens": False}
        | {"seed": None},
        reward=3.5,
    )
    assert (rollout.step, rollout.version, rollout.model) == (4, "12", "tiny")
    assert rollout.kind is LogprobKind.RAW
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.trainer_logprobs == (-0.4, -0.9)
    assert rollout.sampling == SamplingParams(temperature=1.2, min_p=0.1, top_k=0, max_tokens=9)
    assert rollout.stated == {"temperature", "top_k", "min_p", "max_tokens"}


@pytest.mark.parametrize("name", TRAINER_KEYS)
def test_the_trainer_s_numbers_are_read_under_every_name_they_go_by(name):
    assert plain(**{name: [-0.4, -0.9]}).trainer_logprobs == (-0.4, -0.9)


def test_two_names_for_the_trainer_s_numbers_are_one_too_many():
    with pytest.raises(RecordError):
        plain(trainer_logprobs=[-0.4, -0.9], old_logprobs=[-0.4, -0.9])
    assert plain(trainer_logprobs=None, old_logprobs=[-0.4, -0.9]).trainer_logprobs == (-0.4, -0.9)


def test_what_shapes_a_distribution_is_read_wherever_it_stands():
    """In JSON every key is a string, token ids too."""
    for rollout in (
        plain(logit_bias={"5": 1.5}, min_tokens=2),
        plain(sampling={"logit_bias": {"5": 1.5}, "min_tokens": 2}),
    ):
        assert rollout.sampling.logit_bias == {5: 1.5}
        assert rollout.sampling.min_tokens == 2
        assert {"logit_bias", "min_tokens"} <= rollout.stated


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_ids": [1]}, RecordError),
        ({"token_ids": "3 4"}, RecordError),
        ({"logprobs": [-0.5]}, InvalidCompletion),
        ({"temperature": -1}, InvalidSampling),
        ({"temperature": "hot"}, InvalidSampling),
        ({"sampling": [0.7]}, InvalidSampling),
        ({"sampling": {"typical_p": 0.9}}, InvalidSampling),
        ({"sampling": {"top_p": 0.9}, "top_p": 0.8}, InvalidSampling),
        ({"kind": "cooked"}, InvalidValue),
        ({"model": 7}, InvalidValue),
        ({"version": [7]}, InvalidValue),
    ],
)
def test_a_plain_line_that_contradicts_itself(change, error):
    with pytest.raises(error):
        plain(**change)
    with pytest.raises(RecordError):
        read_plain({"prompt_ids": [1], "logprobs": []}, PLACE)
    # Words of another vocabulary contradict nothing.
    assert plain(finish_reason="tool_calls").finish_reason is None
    assert plain(kind="processed").kind is LogprobKind.PROCESSED


def test_our_own_line_is_judged_by_what_was_asked():
    (rollout,) = read_own(own(), PLACE)
    assert rollout.prompt == (1, 2)
    assert rollout.sampling == SamplingParams(top_p=0.9)
    assert rollout.stated == set(SHAPING)
    assert rollout.version == "3+4"
    assert rollout.kind is LogprobKind.RAW
    assert rollout.finish_reason is FinishReason.STOP
    biased = Request(Prompt((1, 2)), SamplingParams(logit_bias={5: 1.5}))
    assert read_own(own(request=biased), PLACE)[0].sampling.logit_bias == {5: 1.5}


@pytest.mark.parametrize(
    ("problem", "error"),
    [
        (Problem("value/non-finite", "logprobs[0] is nan"), NonFinite),
        (Problem("engine/bad-answer", "no"), InvalidCompletion),
    ],
)
def test_our_own_line_without_a_completion_says_why(problem, error):
    with pytest.raises(error):
        read_own(own(completion=None, problem=problem), PLACE)


def test_prime_rl_gives_one_rollout_per_turn():
    first, second = read_prime_rl(PRIME_RL, PLACE)
    assert (first.prompt, first.output) == ((5, 6), (7, 8))
    assert (first.logprobs, first.trainer_logprobs) == ((-0.1, -0.2), (-0.11, -0.21))
    assert (second.prompt, second.output) == ((5, 6, 7, 8, 9), (10,))
    assert {first.step, second.step} == {12}
    assert first.sampling.temperature == 0.7
    assert first.stated == {"temperature"}


def test_tokens_of_a_frozen_model_were_not_sampled():
    weights = {"rl_weights": [0.0] * 5 + [1.0, 0.0], "ce_weights": [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]}
    (rollout,) = read_prime_rl({**PRIME_RL, **weights}, PLACE)
    assert rollout.output == (10,)
    distilled = {**weights, "ref_kl_weights": [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]}
    assert [each.output for each in read_prime_rl({**PRIME_RL, **distilled}, PLACE)] == [(7, 8), (10,)]
    assert read_prime_rl({**PRIME_RL, "loss_mask": [False] * 7}, PLACE) == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema_version": 2}, InvalidValue),
        ({"inference_logprobs": [-0.1]}, InvalidCompletion),
        ({"loss_mask": [True]}, InvalidCompletion),
        ({"inference_logprobs": [None] * 7}, NonFinite),
        ({"trainer_logprobs": [None] * 7}, NonFinite),
        ({"loss_mask": [True] * 7}, InvalidCompletion),
    ],
)
def test_prime_rl_lines_that_cannot_be(change, error):
    fields = {**PRIME_RL, "trainer_logprobs": [-1.0] * 7, **change}
    with pytest.raises(error):
        read_prime_rl(fields, PLACE)
