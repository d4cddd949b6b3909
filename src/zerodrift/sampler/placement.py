"""A point in the sampled token's piece of [0, 1): what `stats.placement` tests. Shapes: T tokens, V vocabulary."""

from typing import NamedTuple

import torch


class Points(NamedTuple):
    """One of each per token."""

    by_likelihood_T: torch.Tensor
    """Likelier tokens come first; equally likely ones share a piece."""
    by_id_T: torch.Tensor
    """Tokens in the order of their ids, as samplers that invert a cumulative sum have them."""


def place(logprobs_TV: torch.Tensor, tokens_T: torch.Tensor, within_T: torch.Tensor) -> Points:
    """`within` are even numbers from [0, 1) that say where in its piece each point is put."""
    probs_TV = logprobs_TV.exp()
    own_T1 = probs_TV.gather(-1, tokens_T[:, None])
    likelier_T = torch.where(probs_TV > own_T1, probs_TV, 0.0).sum(dim=-1)
    as_likely_T = torch.where(probs_TV == own_T1, probs_TV, 0.0).sum(dim=-1)
    up_to_T = probs_TV.cumsum(dim=-1).gather(-1, tokens_T[:, None])[:, 0]
    return Points(
        (likelier_T + within_T * as_likely_T).clamp(0, 1),
        (up_to_T - (1 - within_T) * own_T1[:, 0]).clamp(0, 1),
    )
