"""GSPO: one ratio per sequence, the geometric mean of its tokens', clipped as a whole.

    loss = -1/S Σ_s min(r_s A_s, clip(r_s) A_s)        r_s = exp(1/|s| Σ_t (current_t - old_t))

A sequence's mean log-ratio is small, and so is its clip: 3e-4 and 4e-4, as its authors have it.
"""

import torch

from zerodrift.train.objectives.base import LossInputs, Part, RatioBounds, clipped_surrogate, per_sequence


def gspo(inputs: LossInputs, clip: RatioBounds) -> Part:
    """A correction's weight is the mean of its tokens'."""
    ratio_S = torch.exp(per_sequence(inputs.current - inputs.old, inputs))
    earned_S, cut_S = clipped_surrogate(ratio_S, inputs.advantage, clip)
    weight_S = per_sequence(inputs.weight, inputs)
    clipped = int((cut_S * inputs.lengths).sum())
    return Part(-(weight_S * earned_S).sum() / inputs.totals.sequences, clipped)
