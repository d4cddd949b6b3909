"""How surprising are the tokens of a distribution: the mean and the variance of log p under p itself.

They are what a test of sampled tokens needs to know beside the tokens (`stats.martingale`).
"""

from typing import NamedTuple

import torch


class Moments(NamedTuple):
    """One of each per row."""

    entropy_T: torch.Tensor
    """H = -Σ p log p."""
    variance_T: torch.Tensor
    """Σ p (log p + H)²."""


def surprise_moments(logprobs_TV: torch.Tensor) -> Moments:
    """Of rows of logprobs, in their dtype; excluded tokens may be -inf."""
    probs_TV = logprobs_TV.exp()
    # 0 · log 0 = 0: excluded tokens carry no surprise because they carry no mass.
    surprise_TV = torch.where(probs_TV > 0, logprobs_TV, 0.0)
    entropy_T = -(probs_TV * surprise_TV).sum(dim=-1)
    # Around the mean: Σ p (log p)² - H² would lose its digits, and may go below zero.
    return Moments(entropy_T, (probs_TV * (surprise_TV + entropy_T[:, None]) ** 2).sum(dim=-1))
