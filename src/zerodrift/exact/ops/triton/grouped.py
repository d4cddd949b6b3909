"""Products of all experts at once: one program per tile of rows that go to one expert, K in order, never split.

Pairs of a token and one of its experts are sorted by expert. Where an expert's pairs begin and end is on the device alone,
and the grid is as large as it could ever have to be: programs without a tile leave at once. So a captured step stays
valid however its tokens are routed. A pair's row is what `gemm.linear` would give it with the weight of its expert, bit by
bit: which tile it stands in, and beside whom, is up to its neighbours, and changes nothing.
Shapes: T tokens, K experts of a token, P pairs of both, E experts, N outputs, D inputs of a product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from zerodrift.exact.ops.triton.gemm import tile_for


class Groups(NamedTuple):
    """Pairs by expert, on the device."""

    order_P: torch.Tensor
    """Pairs (token · K + place) in order of their experts, and of their number where these are equal."""
    ends_E: torch.Tensor
    """Where each expert's pairs end in that order."""
    per_token: int


class Weight(NamedTuple):
    """How a kernel walks through the weights of an expert: [columns, depth], whichever of the two lies side by side."""

    of_expert: int
    column: int
    depth: int


def groups_of(experts_TK: torch.Tensor, num_experts: int) -> Groups:
    """By a stable sort: the place of a pair does not depend on anything but the numbers of experts."""
    sorted_P, order_P = torch.sort(experts_TK.flatten(), stable=True)
    numbers_E = torch.arange(num_experts, device=experts_TK.device)
    ends_E = torch.searchsorted(sorted_P, numbers_E, right=True)
    return Groups(order_P.int(), ends_E.int(), experts_TK.shape[1])


@triton.jit
def _place_of(tile, ends_ptr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr):
    """Whose tile it is, where it begins among the pairs, and where its expert's pairs end; BLOCK where there is none."""
    e = tl.arange(0, BLOCK)
    ends = tl.load(ends_ptr + e, mask=e < EXPERTS, other=0)
    starts = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
    tiles = tl.where(e < EXPERTS, (ends - starts + BM - 1) // BM, 0)
    tiles_up_to = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
    own = e == expert
    first = tl.sum(tl.where(own, starts + (tile - tiles_up_to + tiles) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(own, ends, 0), 0)


@triton.jit
def _product_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    order_ptr,
    ends_ptr,
    columns,
    depth,
    w_expert,
    w_column,
    w_depth,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FROM: tl.constexpr,
    TO_PAIRS: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    expert, first, end = _place_of(tl.program_id(1), ends_ptr, EXPERTS, BLOCK, BM)
    if expert == BLOCK:
        return
    place = first + tl.arange(0, BM)
    live = place < end
    pair = tl.load(order_ptr + place, mask=live, other=0)
    # FROM: 0 where rows stand by expert, else as many pairs as a row stands for.
    row = place if FROM == 0 else pair // FROM
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = x_ptr + row[:, None].to(tl.int64) * depth + k[None, :]
    w = w_ptr + expert.to(tl.int64) * w_expert + n[None, :].to(tl.int64) * w_column + k[:, None] * w_depth
    total = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, depth, BK):
        if WHOLE:
            a = tl.load(x, mask=live[:, None], other=0.0)
            b = tl.load(w, mask=n[None, :] < columns, other=0.0)
        else:
            a = tl.load(x, mask=live[:, None] & (k[None, :] < depth - begin), other=0.0)
            b = tl.load(w, mask=(n[None, :] < columns) & (k[:, None] < depth - begin), other=0.0)
        total = tl.dot(a, b, total)
        x += BK
        w += BK * w_depth
    if TO_PAIRS:
        place = pair
    out = out_ptr + place[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n[None, :] < columns))


def product(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, Weight],
    columns: int,
    groups: Groups,
    places: tuple[int, bool],
    dtype: torch.dtype,
) -> torch.Tensor:
    """[P, columns] of rows and the weights of their experts, rounded once.

    `places`: how many pairs a row of x stands for, 0 where rows stand by expert; and whether results are to stand by pair.
    """
    x = x.contiguous()
    pairs, experts, depth = len(groups.order_P), len(groups.ends_E), x.shape[-1]
    out_PN = torch.empty(pairs, columns, device=x.device, dtype=dtype)
    # By the mean, which the host knows; an expert with more pairs has more tiles.
    tile = tile_for(triton.cdiv(pairs, experts))
    most_tiles = min(pairs, pairs // tile.rows + experts)
    # Column tiles first: programs that run side by side read the same rows.
    _product_kernel[(triton.cdiv(columns, tile.columns), most_tiles)](
        x,
        weights[0],
        out_PN,
        groups.order_P,
        groups.ends_E,
        columns,
        depth,
        *weights[1],
        experts,
        triton.next_power_of_2(experts),
        *places,
        depth % tile.depth == 0,
        tile.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_PN


@triton.jit
def _weight_grad_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    order_ptr,
    ends_ptr,
    columns,
    depth,
    GRAD_BY_PAIR: tl.constexpr,
    FROM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BP: tl.constexpr,
):
    expert = tl.program_id(2)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BN, BD), tl.float32)
    for begin in range(start, end, BP):
        place = begin + tl.arange(0, BP)
        live = place < end
        pair = tl.load(order_ptr + place, mask=live, other=0)
        row = place if FROM == 0 else pair // FROM
        if GRAD_BY_PAIR:
            place = pair
        grad = tl.load(
            grad_ptr + place[None, :].to(tl.int64) * columns + n[:, None],
            mask=live[None, :] & (n[:, None] < columns),
            other=0.0,
        )
        x = tl.load(
            x_ptr + row[:, None].to(tl.int64) * depth + d[None, :],
            mask=live[:, None] & (d[None, :] < depth),
            other=0.0,
        )
        total = tl.dot(grad, x, total)
    at = (expert.to(tl.int64) * columns + n[:, None]) * depth + d[None, :]
    tl.store(
        out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(n[:, None] < columns) & (d[None, :] < depth)
    )


_GRAD_TILE, _GRAD_PAIRS, _GRAD_WARPS, _GRAD_STAGES = 128, 32, 8, 3


def weight_grad(
    grad_PN: torch.Tensor, x: torch.Tensor, groups: Groups, places: tuple[bool, int]
) -> torch.Tensor:
    """[E, N, D]: each expert's pairs added in order, by one program for each tile; 0 for experts without any.

    `places`: whether gradients stand by pair, and how many pairs a row of x stands for (0: rows stand by expert).
    """
    grad_PN, x = grad_PN.contiguous(), x.contiguous()
    experts, columns, depth = len(groups.ends_E), grad_PN.shape[1], x.shape[-1]
    out_END = torch.empty(experts, columns, depth, device=x.device, dtype=x.dtype)
    _weight_grad_kernel[(triton.cdiv(columns, _GRAD_TILE), triton.cdiv(depth, _GRAD_TILE), experts)](
        grad_PN,
        x,
        out_END,
        groups.order_P,
        groups.ends_E,
        columns,
        depth,
        *places,
        _GRAD_TILE,
        _GRAD_TILE,
        _GRAD_PAIRS,
        num_warps=_GRAD_WARPS,
        num_stages=_GRAD_STAGES,
    )
    return out_END
