"""How much of a distribution lies in the sets that `drift.draws` counts. Shapes: T tokens, V vocabulary."""

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from zerodrift.drift.tokens import ENDS, LIKELIEST, RANGES, RARE, RECENT, DrawMasses


def draw_masses(
    logprobs_TV: torch.Tensor, tokens_T: torch.Tensor, stop_ids: Sequence[int], before: Sequence[int] = ()
) -> DrawMasses:
    """Of rows of logprobs, whose excluded tokens are -inf. The rows follow each other; `before` is what was drawn before them."""
    probs_TV = logprobs_TV.exp()
    vocab_size = probs_TV.shape[-1]
    stops = torch.tensor(sorted({each for each in stop_ids if each < vocab_size}), dtype=torch.long)
    stop_T = probs_TV[:, stops].sum(dim=-1)
    # Where nothing but a stop is possible there is no second question, and its masses are 0.
    rest_T1 = (1 - stop_T).clamp(min=1e-12)[:, None]
    other_TV = probs_TV.index_fill(1, stops, 0.0) / rest_T1
    rarity_TV = _rarity(other_TV)
    by_rarity_TC = torch.zeros(len(other_TV), len(RARE) + 1, dtype=other_TV.dtype)
    by_rarity_TC.scatter_add_(1, rarity_TV, other_TV)
    likeliest = other_TV.topk(min(LIKELIEST, vocab_size), dim=-1)
    lacking = (0, LIKELIEST - likeliest.values.shape[1])
    recent_TR, recurs_TR = recent_masses(other_TV, tokens_T, before)
    return DrawMasses(
        ranges=_ranges(other_TV).float().numpy(),
        ends=torch.stack(
            [part.sum(dim=-1) for size in ENDS for part in (other_TV[:, :size], other_TV[:, -size:])], dim=1
        )
        .float()
        .numpy(),
        # Rarer than each: what lies in the classes after it.
        rarer=by_rarity_TC.flip(1).cumsum(1).flip(1)[:, 1:].float().numpy(),
        rarity=rarity_TV.gather(1, tokens_T[:, None])[:, 0].to(torch.uint8).numpy(),
        likeliest=pad(likeliest.indices, lacking, value=-1).int().numpy(),
        likeliest_mass=pad(likeliest.values, lacking).float().numpy(),
        stop=stop_T.float().numpy(),
        stopped=torch.isin(tokens_T, stops).numpy(),
        recent=recent_TR.float().numpy(),
        recurs=recurs_TR.numpy(),
        vocab_size=vocab_size,
    )


def recent_masses(
    probs_TV: torch.Tensor, tokens_T: torch.Tensor, before: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """How likely one of the last tokens is, for each number of RECENT, and whether it came."""
    most = max(RECENT)
    drawn = torch.tensor([*[-1] * most, *before[-most:]])[-most:]
    lasts_TK = torch.cat([drawn, tokens_T])[: len(tokens_T) + most - 1].unfold(0, most, 1).flip(1)
    # The same token twice is one of them once; in front of an output is nothing.
    twice = (lasts_TK[:, :, None] == lasts_TK[:, None, :]).tril(-1).any(dim=2)
    counts = (lasts_TK >= 0) & ~twice
    masses_TK = probs_TV.gather(1, lasts_TK.clamp(min=0)) * counts
    came_TK = (lasts_TK == tokens_T[:, None]).cumsum(1) > 0
    columns = [count - 1 for count in RECENT]
    return masses_TK.cumsum(1)[:, columns].clamp(max=1.0), came_TK[:, columns]


def _rarity(probs_TV: torch.Tensor) -> torch.Tensor:
    """Of each token: than how many of RARE it is less likely."""
    edges = torch.tensor(sorted(RARE), dtype=probs_TV.dtype)
    return len(RARE) - torch.bucketize(probs_TV, edges, right=True)


def _ranges(probs_TV: torch.Tensor) -> torch.Tensor:
    width = range_width(probs_TV.shape[-1])
    padded_TV = pad(probs_TV, (0, RANGES * width - probs_TV.shape[-1]))
    return padded_TV.view(len(probs_TV), RANGES, width).sum(dim=-1)


def range_width(vocab_size: int) -> int:
    """Ids in each of the RANGES."""
    return math.ceil(vocab_size / RANGES)
