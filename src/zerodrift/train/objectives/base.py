"""What every objective is given, and what it gives back.

Shapes: T tokens of all sequences in a row, S sequences. A step's batch may come in several parts, each with its own
backward: sums are divided by the totals of the whole step, so that the parts add up to its loss.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Totals(NamedTuple):
    """Of the whole step."""

    tokens: int
    sequences: int


class LossInputs(NamedTuple):
    """One part of a step's batch."""

    current: torch.Tensor
    """[T] logprobs of the weights that learn, with their graph."""
    old: torch.Tensor
    """[T] those that the ratio is taken against: the engine's own, or, where a correction is on, the trainer's."""
    weight: torch.Tensor
    """[T] the correction's, 1 where there is none."""
    advantage: torch.Tensor
    """[S]"""
    lengths: torch.Tensor
    """[S] tokens of each sequence."""
    totals: Totals

    @property
    def sequence(self) -> torch.Tensor:
        """[T] which sequence a token is of."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @property
    def token_advantage(self) -> torch.Tensor:
        """[T]"""
        return self.advantage[self.sequence]


class RatioBounds(NamedTuple):
    """Ratios outside [1 - low, 1 + high] earn nothing more."""

    low: float
    high: float


class Part(NamedTuple):
    """A part of a step's loss."""

    loss: torch.Tensor
    clipped: int
    """Tokens whose gradient the clip took away."""


class Objective(NamedTuple):
    """A loss with its own advantages and its own clip."""

    clip: RatioBounds
    advantages: Callable[[Sequence[float]], list[float]]
    loss: Callable[[LossInputs, RatioBounds], Part]
    mean: Callable[[torch.Tensor, LossInputs], torch.Tensor]
    """Of values [T]: how tokens count in it. What is added to the loss counts them alike."""


def per_sequence(values_T: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[S] the mean over each sequence's tokens."""
    sums_S = torch.zeros(len(inputs.lengths), dtype=values_T.dtype).index_add(0, inputs.sequence, values_T)
    return sums_S / inputs.lengths


def token_mean(values_T: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """This part's share of the mean over all tokens of the step."""
    return values_T.sum() / inputs.totals.tokens


def sequence_mean(values_T: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """This part's share of the mean over all sequences of the step, each by the mean over its tokens."""
    return per_sequence(values_T, inputs).sum() / inputs.totals.sequences


def clipped_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, clip: RatioBounds
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r) A), elementwise, and where the clip took the gradient away."""
    plain = ratio * advantage
    limited = ratio.clamp(1 - clip.low, 1 + clip.high) * advantage
    return torch.minimum(plain, limited), (limited < plain).detach()
