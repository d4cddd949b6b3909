"""Which token a distribution and a uniform number give: inversion of the cumulative distribution."""

import torch


def choose(logprobs_V: torch.Tensor, uniform: float) -> int:
    """The token whose slice of [0, 1) holds `uniform`, in vocabulary order, in fp64.

    Strictly-greater search: a token of probability zero has an empty slice and can never be chosen, and
    `uniform` < 1 never falls off the end.
    """
    cumulative_V = logprobs_V.double().exp().cumsum(dim=0)
    return int(torch.searchsorted(cumulative_V, uniform * cumulative_V[-1], right=True))
