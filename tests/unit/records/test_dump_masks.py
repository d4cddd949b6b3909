from typing import Any

import pytest

from zerodrift.core.errors import InvalidCompletion
from zerodrift.core.request import SamplingParams
from zerodrift.records.dump_fields import LinePlace, Numbers, messages_of, numbers_of, prompt_text_of
from zerodrift.records.dump_formats import read_plain
from zerodrift.records.recorded import Message, RecordedRollout

PLACE = LinePlace("d", 1, SamplingParams())
PADDED: dict[str, Any] = {
    "prompt_token_ids": [0, 0, 5, 6],
    "token_ids": [7, 8, 9, 0, 0],
    "logprobs": [-0.1, -0.2, -0.3, 0.0, 0.0],
}


def read(**fields: Any) -> list[RecordedRollout]:
    return read_plain({**PADDED, **fields}, PLACE)


@pytest.mark.parametrize(
    "masks",
    [
        {"attention_mask": [0, 0, 1, 1, 1, 1, 1, 0, 0]},
        {"prompt_mask": [0, 0, 1, 1], "completion_mask": [1, 1, 1, 0, 0]},
        {"attention_mask": [0, 0, 1, 1], "response_mask": [1, 1, 1, 0, 0]},
        {"prompt_attention_mask": [False, False, True, True], "attention_mask": [1, 1, 1, 0, 0]},
        {"prompt_mask": [0, 0, 1, 1], "loss_mask": [1, 1, 1, 0, 0], "logprobs": [-0.1, -0.2, -0.3]},
    ],
)
def test_a_mask_says_what_is_padding(masks):
    (rollout,) = read(**masks)
    assert (rollout.prompt, rollout.output) == ((5, 6), (7, 8, 9))
    assert rollout.logprobs == (-0.1, -0.2, -0.3)


def test_without_a_mask_nothing_is_cut():
    (rollout,) = read()
    assert (len(rollout.prompt), len(rollout.output)) == (4, 5)


def test_what_stands_between_sampled_tokens_is_context():
    first, second = read(
        prompt_mask=[0, 0, 1, 1], completion_mask=[1, 0, 1, 0, 0], trainer_logprobs=[-1.0, -2.0]
    )
    assert (first.prompt, first.output, first.logprobs) == ((5, 6), (7,), (-0.1,))
    assert (second.prompt, second.output, second.logprobs) == ((5, 6, 7, 8), (9,), (-0.3,))
    assert (first.trainer_logprobs, second.trainer_logprobs) == ((-1.0,), (-2.0,))


def test_nothing_sampled():
    (rollout,) = read(completion_mask=[0] * 5, logprobs=[])
    assert rollout.output == ()


@pytest.mark.parametrize(
    "masks",
    [
        {"attention_mask": [1, 1]},
        {"completion_mask": [1, 1]},
        {"completion_mask": [1, 1, 1, 2, 0]},
        {"completion_mask": [1, 1, 1, 0, 0], "logprobs": [-0.1, -0.2]},
        {"token_ids": [7, 8, 9, 0], "logprobs": [-1.0] * 4, "attention_mask": [1, 1, 1, 0]},
    ],
)
def test_a_mask_that_does_not_fit_is_refused(masks):
    with pytest.raises(InvalidCompletion):
        read(**masks)


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ((0.5, 1.5), Numbers((-0.5, -1.5), sign_turned=True)),
        ((0.0, 0.3), Numbers((0.0, -0.3), sign_turned=True)),
        ((-0.5, 0.0), Numbers((-0.5, 0.0))),
        ((-0.5, 0.3), Numbers((-0.5, 0.3))),
        ((0.0, 1e-5), Numbers((0.0, 1e-5))),
        ((0.5, None), Numbers((0.5, None))),
        ((True, 0.5), Numbers((True, 0.5))),
        ((), Numbers(())),
    ],
)
def test_numbers_above_zero_are_turned_and_told(values, numbers):
    assert numbers_of(values) == numbers


def test_the_trainers_numbers_share_the_sign():
    (rollout,) = read(logprobs=[0.1] * 5, trainer_logprobs=[0.2] * 5)
    assert (rollout.sign_turned, rollout.trainer_logprobs) == (True, (-0.2,) * 5)
    with pytest.raises(InvalidCompletion):
        read(trainer_logprobs=[0.2] * 5)


def test_what_a_line_says_of_its_prompt():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages_of({"messages": turns}) == (Message("user", "a"),)
    assert messages_of({"prompt": turns[:1]}) == (Message("user", "a"),)
    assert messages_of({"messages": [{"role": "user", "content": [{"type": "image"}]}]}) == ()
    assert messages_of({"messages": "a"}) == ()
    assert (prompt_text_of({"prompt": "a"}), prompt_text_of({"prompt": turns})) == ("a", None)
