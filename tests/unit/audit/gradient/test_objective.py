"""Weights of tokens against the objective as it is written, and batches that lack what a gradient needs."""

import math

import numpy as np
import pytest
import torch

from zerodrift.audit.gradient.objective import ClipRange, advantages, learned, weights
from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.core.request import SamplingParams
from zerodrift.records.archived import ArchivedBatch, ArchivedRollout, BatchState, version_spans

CLIP = ClipRange(0.2, 0.28)


def rollout(place: int, **changed) -> ArchivedRollout:
    told = {
        "id": str(place), "prompt_token_ids": (1, 2), "token_ids": (3, 4), "behavior_logprobs": (-0.5, -0.6),
        "reward": float(place % 2), "group": str(place // 2), "sampling": SamplingParams(temperature=0.7), "stated": ("temperature",),
    }  # fmt: skip
    return ArchivedRollout(**(told | changed))


def batch(*rollouts: ArchivedRollout) -> ArchivedBatch:
    return ArchivedBatch(step=3, state=BatchState.QUARANTINE, rollouts=rollouts)


@pytest.mark.parametrize("advantage", [1.3, -0.7, 0.0])
def test_weights_are_the_derivative_of_the_objective_as_it_is_written(advantage):
    policy = torch.linspace(-3, -0.01, 50, dtype=torch.float64, requires_grad=True)
    behavior = policy.detach() + torch.linspace(-1, 1, 50, dtype=torch.float64).flip(0)
    ratio = torch.exp(policy - behavior)
    clipped = torch.clamp(ratio, 1 - CLIP.low, 1 + CLIP.high)
    torch.min(ratio * advantage, clipped * advantage).sum().backward()
    found = weights(policy.detach().numpy(), behavior.numpy(), advantage, CLIP)
    np.testing.assert_allclose(found.values, policy.grad.numpy(), rtol=1e-14)
    assert found.clipped.any() == (advantage != 0)
    assert not found.clipped.all()


def test_advantages_are_taken_within_a_group():
    found = advantages([("a", 1.0), ("b", 5.0), ("a", 0.0), ("b", 5.0), ("a", 0.5)])
    assert found == pytest.approx([0.5 / 0.5001, 0, -0.5 / 0.5001, 0, 0])


def test_rollouts_come_by_group_with_the_tokens_that_are_learnt():
    first = rollout(0, mask=(False, True))
    groups = learned(batch(rollout(2), first, rollout(1), rollout(3)), None)
    assert [len(group) for group in groups] == [2, 2]
    (mine,) = [each for group in groups for each in group if len(each.places) == 1]
    assert mine.places.tolist() == [1]
    assert mine.behavior.tolist() == [-0.6]
    assert mine.advantage == pytest.approx(-0.5 / (math.sqrt(0.5) + 1e-4))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"reward": None}, InvalidValue),
        ({"reward": math.nan}, NonFinite),
        ({"group": None}, InvalidValue),
        ({"group": "alone"}, InvalidValue),
        ({"behavior_logprobs": (-0.1, math.nan)}, NonFinite),
        ({"stated": ()}, InvalidValue),
        ({"sampling": SamplingParams(temperature=0.0)}, InvalidValue),
        ({"sampling": SamplingParams(temperature=0.7, top_p=0.9), "stated": ("temperature", "top_p")}, InvalidValue),
        ({"versions": version_spans([1, 2])}, InvalidValue),
    ],
)  # fmt: skip
def test_what_the_archive_lacks_is_refused(changed, error):
    with pytest.raises(error):
        learned(batch(rollout(0), rollout(1, **changed)), None)


def test_a_temperature_that_nobody_stated_can_be_given():
    groups = learned(batch(rollout(0, stated=()), rollout(1, stated=())), 0.9)
    assert {each.temperature for group in groups for each in group} == {0.9}


@pytest.mark.parametrize(("low", "high"), [(1.0, None), (-0.1, None), (0.2, -1.0), (math.nan, None)])
def test_an_impossible_clip_is_refused(low, high):
    with pytest.raises(InvalidValue):
        ClipRange.of(low, high)
