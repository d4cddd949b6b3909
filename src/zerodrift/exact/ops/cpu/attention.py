"""Attention over fixed blocks of keys at absolute positions, in plain torch.

Scores of a row against all visible blocks; the row's maximum (exact, so no rescaling); exp; then sums over BLOCK keys
each, added in order of position. A block has one shape whoever asks, a hidden key weighs exactly 0, and adding 0
changes no bit: so a row does not depend on how many queries, keys, padding blocks or neighbours are computed with
it. What must hold for that is proven at start-up (`zerodrift.exact.probe`).
Shapes: Z (sequence, kv head) pairs, C kv heads, G query heads of one kv head, M rows (token, query head), L keys,
D head size, n tokens.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from zerodrift.exact.ops.interface import HeadShape

BLOCK = 64
"""Keys summed in one go. On AVX2 a product over more than 192 is split at a place that depends on its length."""
WEIGHTS_AT_ONCE = 2**20
"""Weights held at a time, 4 MB: over 8,192 and 32,768 keys that takes two thirds of the time of holding all."""
TILE = 64
"""Query tokens computed together in prefill. 16 was slower; 24, 32 and 64 were alike at 128 to 1,756 keys."""


class Keys(NamedTuple):
    """Keys and values of `first`… in order of position, for every (sequence, kv head); L is a multiple of BLOCK."""

    k_ZLD: torch.Tensor
    v_ZLD: torch.Tensor
    first: int
    """Absolute position of key 0, a multiple of BLOCK."""


class Hidden(NamedTuple):
    """Which keys are out of sight of a query."""

    begin: int
    """Every query sees all keys before this one: their scores need no mask."""
    hidden_nl: torch.Tensor
    """For the keys from `begin` on."""


def attend_rows(
    q_ZMD: torch.Tensor, keys: Keys, hidden: Hidden, view: tuple[int, ...], out_ZMD: torch.Tensor
) -> None:
    """softmax(q kᵀ) v for scaled q into `out`, which may have fewer rows; `hidden` masks scores seen as `view`."""
    pairs, rows, size = q_ZMD.shape
    blocks = keys.k_ZLD.shape[1] // BLOCK
    scores_ZML = torch.bmm(q_ZMD, keys.k_ZLD.transpose(1, 2))
    scores_ZML.view(view)[..., hidden.begin :].masked_fill_(hidden.hidden_nl, -torch.inf)
    by_block = scores_ZML.view(pairs, rows, blocks, BLOCK).transpose(1, 2)
    highest_Z1M1 = scores_ZML.amax(dim=-1)[:, None, :, None]
    total_ZMD, total_ZM1 = q_ZMD.new_zeros(pairs, rows, size), q_ZMD.new_zeros(pairs, rows, 1)
    at_once = max(1, WEIGHTS_AT_ONCE // (pairs * rows * BLOCK))
    for begin in range(0, blocks, at_once):
        # Blocks before rows: then several are one product, 1.8 times as fast as one after another for few rows.
        inside = slice(begin, begin + at_once)
        weights_ZBMk = q_ZMD.new_empty(pairs, min(at_once, blocks - begin), rows, BLOCK)
        torch.sub(by_block[:, inside], highest_Z1M1, out=weights_ZBMk).exp_()
        sums_ZBM1 = weights_ZBMk.sum(dim=-1, keepdim=True)
        values = keys.v_ZLD[:, begin * BLOCK : (begin + at_once) * BLOCK].reshape(-1, BLOCK, size)
        parts_ZBMD = torch.bmm(weights_ZBMk.view(-1, rows, BLOCK), values).view(pairs, -1, rows, size)
        for block in range(parts_ZBMD.shape[1]):
            total_ZMD += parts_ZBMD[:, block]
            total_ZM1 += sums_ZBM1[:, block]
    kept = out_ZMD.shape[1]
    torch.div(total_ZMD[:, :kept], total_ZM1[:, :kept], out=out_ZMD)
    # -0 and +0 are equal sums, but which one comes out could show whether hidden blocks were added before.
    out_ZMD += 0.0


def attend_sequence(
    q_nHD: torch.Tensor, first: int, keys: Keys, shape: HeadShape, min_rows: int
) -> torch.Tensor:
    """Queries at positions `first`… of one sequence, TILE tokens at a time."""
    count, heads, size = q_nHD.shape
    num_kv = keys.k_ZLD.shape[0]
    group = heads // num_kv
    # Small products take another path in BLAS: a tile has at least `min_rows` rows, if need be of zeros.
    least = -(-min_rows // group)
    padded = max(count, least)
    q_CnGD = q_nHD.new_zeros(num_kv, padded, group, size)
    torch.mul(q_nHD.view(count, num_kv, group, size).transpose(0, 1), shape.scale, out=q_CnGD[:, :count])
    out_CnGD = torch.empty_like(q_CnGD)
    for begin, end in _tiles(padded, least):
        positions_n = torch.arange(first + begin, first + end).clamp_(max=first + count - 1)
        low = first_block(first + begin, shape.window) - keys.first
        high = end_block(min(first + end, first + count) - 1) - keys.first
        visible = Keys(keys.k_ZLD[:, low:high], keys.v_ZLD[:, low:high], low + keys.first)
        hidden = hidden_keys(positions_n, visible.first, high - low, shape.window)
        out_CMD = q_nHD.new_empty(num_kv, (end - begin) * group, size)
        attend_rows(
            q_CnGD[:, begin:end].reshape(num_kv, -1, size),
            visible,
            Hidden(hidden.begin, hidden.hidden_nl[:, None]),
            (num_kv, end - begin, group, high - low),
            out_CMD,
        )
        out_CnGD[:, begin:end] = out_CMD.view(num_kv, -1, group, size)
    return out_CnGD[:, :count].transpose(0, 1).reshape(count, heads, size)


def hidden_keys(positions_n: torch.Tensor, first: int, length: int, window: int | None) -> Hidden:
    """What queries at `positions` do not see of keys `first` to `first` + `length` - 1."""
    begin = max(0, int(positions_n.min()) + 1 - first) if window is None else 0
    keys_l = torch.arange(first + begin, first + length)
    hidden_nl = keys_l > positions_n[:, None]
    if window is not None:
        hidden_nl |= keys_l <= positions_n[:, None] - window
    return Hidden(begin, hidden_nl)


def first_block(position: int, window: int | None) -> int:
    """Where the block starts that holds the first key in sight of a query at `position`."""
    return 0 if window is None else max(0, position - window + 1) // BLOCK * BLOCK


def end_block(position: int) -> int:
    """Where the block ends that holds `position`."""
    return (position // BLOCK + 1) * BLOCK


def _tiles(count: int, least: int) -> list[tuple[int, int]]:
    """Cuts of TILE tokens, the last at least `least` long."""
    cuts = [*range(0, count, TILE), count]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] < least:
        del cuts[-2]
    return list(pairwise(cuts))
