from math import log

import numpy as np
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


def drawn(rollout, prompts, times, answers, seed=0):
    """Outputs of one token, some of which repeat by chance: each of `answers` is as likely."""
    rng = np.random.default_rng(seed)
    return [
        rollout(prompt=(prompt,), output=(int(token),), logprobs=(-log(answers),))
        for prompt in range(prompts)
        for token in rng.integers(answers, size=times)
    ]


def test_a_file_that_was_written_twice_is_copied_throughout(rollout):
    """Of each output by itself chance would be an account; not of all of them."""
    once = drawn(rollout, prompts=24, times=2, answers=100)
    assert copies([each for each in once for _ in (0, 1)]).tolist() == [False, True] * 48


def test_what_was_drawn_twice_in_a_file_that_was_written_twice(rollout):
    once = [*drawn(rollout, prompts=48, times=1, answers=100), *[rollout(output=(7,), logprobs=(-2.0,))] * 2]
    assert copies(once * 2).sum() == 50


@pytest.mark.parametrize("answers", [2, 20, 500])
def test_what_chance_repeats_throughout_is_not_copied(answers, rollout):
    assert not copies(drawn(rollout, prompts=200, times=16, answers=answers)).any()


def test_other_prompts_and_other_numbers_are_other_draws(rollout):
    one = rollout(logprobs=(-9.0, -9.0, -9.0))
    others = [rollout(prompt=(2,), logprobs=one.logprobs), rollout(logprobs=(-9.0, -9.0, -9.1))]
    assert not copies([one, *others]).any()


def test_greedy_rollouts_repeat_by_nature(rollout):
    greedy = rollout(logprobs=(-9.0, -9.0, -9.0), sampling=SamplingParams(temperature=0))
    assert not copies([greedy] * 9).any()
