import pytest

from zerodrift.audit.recorded.copies import copies
from zerodrift.core.request import SamplingParams


@pytest.mark.parametrize(
    ("logprob", "times", "copied"),
    [
        # One in a million may not come twice; e^-3 may, but not ten times in ten.
        (-14.0, 2, True),
        (-13.0, 2, False),
        (-3.0, 2, False),
        (-3.0, 10, True),
        # Yes, ten times in ten: a sure answer.
        (-0.1, 10, False),
    ],
)
def test_what_chance_would_not_repeat_is_copied(logprob, times, copied, rollout):
    same = [rollout(line=line + 1, output=(2,), logprobs=(logprob,)) for line in range(times)]
    assert copies(same).tolist() == [False] + [copied] * (times - 1)


def test_many_draws_repeat_themselves(rollout):
    # Three times in a thousand draws of the same prompt is what e^-5 does.
    same = [rollout(output=(2,), logprobs=(-5.0,))] * 3
    others = [rollout(output=(3, number), logprobs=(-0.1, -9.0)) for number in range(997)]
    assert not copies([*same, *others]).any()
    assert copies([*same, *others[:2]]).sum() == 0
    assert copies([*same * 2, *others[:2]]).sum() == 5


def test_other_prompts_and_other_numbers_are_other_draws(rollout):
    one = rollout(logprobs=(-9.0, -9.0, -9.0))
    others = [rollout(prompt=(2,), logprobs=one.logprobs), rollout(logprobs=(-9.0, -9.0, -9.1))]
    assert not copies([one, *others]).any()


def test_greedy_rollouts_repeat_by_nature(rollout):
    greedy = rollout(logprobs=(-9.0, -9.0, -9.0), sampling=SamplingParams(temperature=0))
    assert not copies([greedy] * 9).any()
