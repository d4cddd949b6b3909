"""Attention over fixed blocks of keys at absolute positions, in plain torch.

Scores of a row against all visible blocks; the row's maximum (exact, so no rescaling); exp; then sums over BLOCK keys
each, added in order of position. A block has one shape whoever asks, a hidden key weighs exactly 0, and adding 0
changes no bit: so a row does not depend on how many queries, keys, padding blocks or neighbours are computed with
it. What must hold for that is proven at start-up (`zerodrift.exact.probe`).
Shapes: Z (sequence, kv head) pairs, C kv heads, G query heads of one kv head, M rows (token, query head), L keys,
D head size, n tokens.
"""

from typing import NamedTuple

import torch

from zerodrift.exact.ops.interface import HeadShape

BLOCK = 64
"""Keys summed in one go. On AVX2 a product over more than 192 is split at a place that depends on its length."""
TILE = 64
"""Query tokens computed together in prefill, so that their scores stay in the second-level cache."""


class Keys(NamedTuple):
    """Keys and values of `first`… in order of position, for every (sequence, kv head); L is a multiple of BLOCK."""

    k_ZLD: torch.Tensor
    v_ZLD: torch.Tensor
    first: int
    """Absolute position of key 0, a multiple of BLOCK."""


def attend_rows(q_ZMD: torch.Tensor, keys: Keys, hidden: torch.Tensor, view: tuple[int, ...]) -> torch.Tensor:
    """softmax(q kᵀ) v for scaled q; `hidden` masks scores seen as `view`."""
    rows, length = q_ZMD.shape[1], keys.k_ZLD.shape[1]
    scores_ZML = torch.bmm(q_ZMD, keys.k_ZLD.transpose(1, 2))
    scores_ZML.view(view).masked_fill_(hidden, -torch.inf)
    scores_ZML.sub_(scores_ZML.amax(dim=-1, keepdim=True)).exp_()
    sums_ZMB = scores_ZML.view(-1, rows, length // BLOCK, BLOCK).sum(dim=-1)
    # From +0: a sum that starts with -0 would show whether blocks before it were skipped.
    out_ZMD = torch.zeros_like(q_ZMD)
    total_ZM1 = torch.zeros_like(q_ZMD[..., :1])
    for block in range(length // BLOCK):
        inside = slice(block * BLOCK, (block + 1) * BLOCK)
        out_ZMD += torch.bmm(scores_ZML[:, :, inside], keys.v_ZLD[:, inside])
        total_ZM1 += sums_ZMB[:, :, block : block + 1]
    return out_ZMD.div_(total_ZM1)


def attend_sequence(
    q_nHD: torch.Tensor, first: int, keys: Keys, shape: HeadShape, min_rows: int
) -> torch.Tensor:
    """Queries at positions `first`… of one sequence, TILE tokens at a time."""
    count, heads, size = q_nHD.shape
    num_kv = keys.k_ZLD.shape[0]
    group = heads // num_kv
    # Small products take another path in BLAS: a tile has at least `min_rows` rows, if need be of zeros.
    padded = max(count, -(-min_rows // group))
    q_CnGD = q_nHD.new_zeros(num_kv, padded, group, size)
    torch.mul(q_nHD.view(count, num_kv, group, size).transpose(0, 1), shape.scale, out=q_CnGD[:, :count])
    out_nCGD = q_nHD.new_empty(padded, num_kv, group, size)
    positions = torch.arange(first, first + padded)
    for begin in _tiles(padded, -(-min_rows // group)):
        tile = slice(*begin)
        last = min(first + begin[1], first + count) - 1
        low = _first_block(first + begin[0], shape.window) - keys.first
        high = (last // BLOCK + 1) * BLOCK - keys.first
        visible = Keys(keys.k_ZLD[:, low:high], keys.v_ZLD[:, low:high], low + keys.first)
        hidden_nL = hidden_keys(positions[tile].clamp(max=last), visible.first, high - low, shape.window)
        q_CMD = q_CnGD[:, tile].reshape(num_kv, -1, size)
        out_CMD = attend_rows(q_CMD, visible, hidden_nL[:, None], (num_kv, -1, group, high - low))
        out_nCGD[tile] = out_CMD.view(num_kv, -1, group, size).transpose(0, 1)
    return out_nCGD[:count].reshape(count, heads, size)


def attend_single(
    q_SHD: torch.Tensor, hidden_SL: torch.Tensor, keys: Keys, scale: float, min_rows: int
) -> torch.Tensor:
    """One query of each of S sequences, all against as many keys."""
    sequences, heads, size = q_SHD.shape
    num_kv = keys.k_ZLD.shape[0] // sequences
    group = heads // num_kv
    rows = max(group, min_rows)
    q_ZMD = q_SHD.view(sequences * num_kv, group, size) * scale
    if rows > group:
        q_ZMD = torch.nn.functional.pad(q_ZMD, (0, 0, 0, rows - group))
    view = (sequences, num_kv * rows, hidden_SL.shape[1])
    return attend_rows(q_ZMD, keys, hidden_SL[:, None], view)[:, :group].reshape(sequences, heads, size)


def hidden_keys(positions_n: torch.Tensor, first: int, length: int, window: int | None) -> torch.Tensor:
    """True where key `first` + l is out of sight of a query."""
    keys_L = torch.arange(first, first + length)
    hidden_nL = keys_L > positions_n[:, None]
    if window is not None:
        hidden_nL |= keys_L <= positions_n[:, None] - window
    return hidden_nL


def _tiles(count: int, least: int) -> list[tuple[int, int]]:
    """Cuts of TILE tokens, the last at least `least` long."""
    cuts = list(range(0, count, TILE)) + [count]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] < least:
        del cuts[-2]
    return list(zip(cuts, cuts[1:], strict=False))


def _first_block(position: int, window: int | None) -> int:
    """Where the block starts that holds the first key in sight of a query at `position`."""
    return 0 if window is None else max(0, position - window + 1) // BLOCK * BLOCK
