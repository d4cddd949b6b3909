"""PPO's clipped objective over tokens, with the group's leave-one-out baseline in place of a critic.

loss = -1/T Σ_t min(r_t A_t, clip(r_t) A_t)        r_t = exp(current_t - old_t)
"""

import torch

from zerodrift.train.objectives.base import LossInputs, Part, RatioBounds, clipped_surrogate, token_mean


def ppo_clip(inputs: LossInputs, clip: RatioBounds) -> Part:
    """Every token of the step counts alike."""
    ratio_T = torch.exp(inputs.current - inputs.old)
    earned_T, cut_T = clipped_surrogate(ratio_T, inputs.token_advantage, clip)
    return Part(-token_mean(inputs.weight * earned_T, inputs), clipped=int(cut_T.sum()))
