"""REINFORCE with a leave-one-out baseline: the plain one. No clip; an old token counts by its ratio.

    loss = -1/T Σ_t exp(current_t - old_t) A_t

At lag 0 every ratio is 1, and the gradient is that of A log p.
"""

import torch

from zerodrift.train.objectives.base import LossInputs, Part, RatioBounds, token_mean


def reinforce_loo(inputs: LossInputs, clip: RatioBounds) -> Part:
    """Every token of the step counts alike."""
    del clip  # it has none
    ratio_T = torch.exp(inputs.current - inputs.old)
    earned_T = inputs.weight * ratio_T * inputs.token_advantage
    return Part(-token_mean(earned_T, inputs), clipped=0)
