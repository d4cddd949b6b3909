"""From the rewards of one prompt's rollouts to their advantages. Torch-free: lists of floats."""

import math
from collections.abc import Sequence

SPREAD = 1e-4
"""Added to the deviation, as GRPO has it: rewards that differ by less than this are not blown up."""


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Each reward less the mean of the others: unbiased, since a sample is no part of its own baseline."""
    total, others = math.fsum(rewards), len(rewards) - 1
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    return [reward - (total - reward) / others for reward in rewards]


def normalised(rewards: Sequence[float]) -> list[float]:
    """Each reward less the mean of all, in deviations (of a sample, n - 1) of the group: GRPO's."""
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    squares = math.fsum((reward - mean) ** 2 for reward in rewards)
    deviation = math.sqrt(squares / (len(rewards) - 1))
    return [(reward - mean) / (deviation + SPREAD) for reward in rewards]


def _all_equal(rewards: Sequence[float]) -> bool:
    """Then advantages are 0, and not what rounding makes of the mean: 0.1 + 0.1 + 0.1 is more than 0.3."""
    return len(set(rewards)) <= 1
