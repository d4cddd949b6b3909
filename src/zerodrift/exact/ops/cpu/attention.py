"""Attention over fixed blocks of keys at absolute positions, in plain torch.

Scores of a row against all visible blocks; the row's maximum (exact, so no rescaling); exp; then sums over BLOCK keys
each, added in order of position. A block has one shape whoever asks, a hidden key weighs exactly 0, and adding 0
changes no bit: so a row does not depend on how many queries, keys, padding blocks or neighbours are computed with
it. What must hold for that is proven of every shape (`proof`).
Shapes: Z (sequence, kv head) pairs, C kv heads, G query heads of one kv head, M rows (token, query head), L keys,
D head size, n tokens.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from zerodrift.exact.ops.cpu.blocks import BLOCK, scores, sums_by_block
from zerodrift.exact.ops.cpu.proof import attention_rows
from zerodrift.exact.ops.interface import HeadShape

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
    """softmax(q kᵀ) v for scaled q into `out`; `hidden` masks the scores seen as `view`."""
    pairs, rows, size = q_ZMD.shape
    padded = attention_rows(q_ZMD, *keys[:2])
    if padded > rows:
        q_ZMD = pad(q_ZMD, (0, 0, 0, padded - rows))
    q_ZMD = q_ZMD.contiguous()
    # Some queries of many may begin anywhere; the proof asked with ones that begin where memory does.
    scores_ZML = scores(q_ZMD if q_ZMD.data_ptr() % 64 == 0 else q_ZMD.clone(), keys.k_ZLD)
    scores_ZML[:, :rows].view(view)[..., hidden.begin :].masked_fill_(hidden.hidden_nl, -torch.inf)
    total_ZMD, total_ZM1 = q_ZMD.new_zeros(pairs, padded, size), q_ZMD.new_zeros(pairs, padded, 1)
    for parts_ZBMD, sums_ZBM1 in sums_by_block(scores_ZML, scores_ZML.amax(dim=-1), keys.v_ZLD):
        for block in range(parts_ZBMD.shape[1]):
            total_ZMD += parts_ZBMD[:, block]
            total_ZM1 += sums_ZBM1[:, block]
    torch.div(total_ZMD[:, :rows], total_ZM1[:, :rows], out=out_ZMD)
    # -0 and +0 are equal sums, but which one comes out could show whether hidden blocks were added before.
    out_ZMD += 0.0


def attend_sequence(q_nHD: torch.Tensor, first: int, keys: Keys, shape: HeadShape) -> torch.Tensor:
    """Queries at positions `first`… of one sequence, TILE tokens at a time."""
    count, heads, size = q_nHD.shape
    num_kv = keys.k_ZLD.shape[0]
    group = heads // num_kv
    out_nCGD = q_nHD.new_empty(count, num_kv, group, size)
    for begin in range(0, count, TILE):
        end = min(begin + TILE, count)
        low = first_block(first + begin, shape.window) - keys.first
        high = end_block(first + end - 1) - keys.first
        visible = Keys(keys.k_ZLD[:, low:high], keys.v_ZLD[:, low:high], low + keys.first)
        hidden = hidden_keys(
            torch.arange(first + begin, first + end), visible.first, high - low, shape.window
        )
        q_CMD = (q_nHD[begin:end] * shape.scale).view(-1, num_kv, group, size).transpose(0, 1)
        out_CMD = q_nHD.new_empty(num_kv, (end - begin) * group, size)
        attend_rows(
            q_CMD.reshape(num_kv, -1, size),
            visible,
            Hidden(hidden.begin, hidden.hidden_nl[:, None]),
            (num_kv, end - begin, group, high - low),
            out_CMD,
        )
        out_nCGD[begin:end] = out_CMD.view(num_kv, -1, group, size).transpose(0, 1)
    return out_nCGD.view(count, heads, size)


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
