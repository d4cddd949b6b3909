"""The two products of attention, over blocks of BLOCK keys: all of it whose bits are up to a library.

Shapes: Z (sequence, kv head) pairs, M rows (token, query head), L keys, B blocks of k keys, D head size.
"""

from collections.abc import Iterator

import torch

BLOCK = 64
"""Keys summed in one go. On AVX2 a product over more than 192 is split at a place that depends on its length."""
WEIGHTS_AT_ONCE = 2**20
"""Weights held at a time, 4 MB: over 8,192 and 32,768 keys that takes two thirds of the time of holding all."""


def scores(q_ZMD: torch.Tensor, k_ZLD: torch.Tensor) -> torch.Tensor:
    """q kᵀ, [Z, M, L]."""
    return torch.bmm(q_ZMD, k_ZLD.transpose(1, 2))


def sums_by_block(
    scores_ZML: torch.Tensor, highest_ZM: torch.Tensor, v_ZLD: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """e^(score - highest) times values [Z, B, M, D], and on its own [Z, B, M, 1], for some blocks at a time."""
    pairs, rows, length = scores_ZML.shape
    size, blocks = v_ZLD.shape[-1], length // BLOCK
    scores_ZBMk = scores_ZML.view(pairs, rows, blocks, BLOCK).transpose(1, 2)
    at_once = max(1, WEIGHTS_AT_ONCE // (pairs * rows * BLOCK))
    for begin in range(0, blocks, at_once):
        end = min(begin + at_once, blocks)
        # Blocks before rows: then several are one product, 1.8 times as fast as one after another for few rows.
        weights_ZBMk = scores_ZML.new_empty(pairs, end - begin, rows, BLOCK)
        torch.sub(scores_ZBMk[:, begin:end], highest_ZM[:, None, :, None], out=weights_ZBMk).exp_()
        values = v_ZLD[:, begin * BLOCK : end * BLOCK].reshape(-1, BLOCK, size)
        parts_ZBMD = torch.bmm(weights_ZBMk.view(-1, rows, BLOCK), values).view(pairs, -1, rows, size)
        yield parts_ZBMD, weights_ZBMk.sum(dim=-1, keepdim=True)
