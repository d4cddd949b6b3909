"""GRPO: clipped ratios of tokens, each sequence's mean counted once, advantages in deviations of the group.

loss = -1/S Σ_s 1/|s| Σ_t min(r_t A_s, clip(r_t) A_s)        r_t = exp(current_t - old_t)
"""

import torch

from zerodrift.train.objectives.base import LossInputs, Part, RatioBounds, clipped_surrogate, sequence_mean


def grpo(inputs: LossInputs, clip: RatioBounds) -> Part:
    """Long sequences do not count more than short ones."""
    ratio_T = torch.exp(inputs.current - inputs.old)
    earned_T, cut_T = clipped_surrogate(ratio_T, inputs.token_advantage, clip)
    return Part(-sequence_mean(inputs.weight * earned_T, inputs), clipped=int(cut_T.sum()))
