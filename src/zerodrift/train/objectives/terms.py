"""What may be added to any objective: a pull towards a reference, a push towards entropy, a correction's weights."""

import torch

from zerodrift.config.training import CorrectionName
from zerodrift.train.objectives.base import LossInputs


def reference_kl(current: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[T] k3 of the KL to the reference, which is never negative: exp(d) - d - 1 with d = reference - current."""
    apart = reference - current
    return torch.expm1(apart) - apart


def entropy(inputs: LossInputs) -> torch.Tensor:
    """[T] of which the mean estimates the entropy, and its gradient the entropy's.

    Of one distribution ∇H = -E[log p ∇log p], so the sampled token's own -r log p, with log p held fixed, has that gradient
    in expectation; r corrects for old tokens. With a correction, `old` is the trainer's, and the way from there to whoever drew
    the token is its weight's. What the other tokens of the vocabulary would say is not used.
    """
    ratio_T = inputs.weight * torch.exp(inputs.current - inputs.old)
    return -ratio_T * inputs.current.detach()


def correction_weights(
    name: CorrectionName, cap: float, trainer: torch.Tensor, engine: torch.Tensor
) -> torch.Tensor:
    """[T] of exp(trainer - engine) under equal intent: 1 everywhere where the engine is exact and nothing is old."""
    if name is CorrectionName.NONE:
        return torch.ones_like(engine)
    weight_T = torch.exp(trainer - engine)
    if name is CorrectionName.TIS:
        return weight_T.clamp(max=cap)
    return torch.where((weight_T <= cap) & (weight_T >= 1 / cap), weight_T, torch.zeros_like(weight_T))
