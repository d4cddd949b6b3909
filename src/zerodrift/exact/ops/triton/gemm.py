"""x Wᵀ + b: one program per tile of the output, K in order, never split.

On an H200 the bits of a row were the same for eight tiles (M 16–128, N 32–256, K 32–256, 4–8 warps) and every number
of rows from 1 to 2,048: only the order of K counts. So a tile is chosen for speed, from the number of rows alone; and
from a table, not by timing, which would choose differently in two processes.
Shapes: T rows, N outputs, K inputs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How much one program computes, and with how many warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = ((16, Tile(16, 64, 128, 4, 4)), (64, Tile(64, 64, 128, 4, 4)), (None, Tile(128, 128, 64, 8, 4)))
"""(up to so many rows, tile)."""
_GROUP = 8
"""Row tiles that share a column tile's weights in the second-level cache."""


@triton.jit
def _linear_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BM)
    per_group = GROUP * tl.cdiv(columns, BN)
    first = program // per_group * GROUP
    height = min(row_tiles - first, GROUP)
    m = (first + program % per_group % height) * BM + tl.arange(0, BM)
    n = program % per_group // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = x_ptr + m[:, None].to(tl.int64) * depth + k[None, :]
    w = w_ptr + n[None, :].to(tl.int64) * depth + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, depth, BK):
        if WHOLE:
            a = tl.load(x, mask=m[:, None] < rows, other=0.0)
            b = tl.load(w, mask=n[None, :] < columns, other=0.0)
        else:
            a = tl.load(x, mask=(m[:, None] < rows) & (k[None, :] < depth - begin), other=0.0)
            b = tl.load(w, mask=(n[None, :] < columns) & (k[:, None] < depth - begin), other=0.0)
        total = tl.dot(a, b, total)
        x += BK
        w += BK
    if HAS_BIAS:
        total += tl.load(b_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < columns))


def tile_for(rows: int) -> Tile:
    """The tile for so many rows."""
    return next(tile for most, tile in TILES if most is None or rows <= most)


def linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x Wᵀ + b, rounded once, to `dtype`."""
    x_TK, weight_NK = x_TK.contiguous(), weight_NK.contiguous()
    (rows, depth), columns = x_TK.shape, weight_NK.shape[0]
    out_TN = torch.empty(rows, columns, device=x_TK.device, dtype=dtype)
    tile = tile_for(rows)
    _linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
        x_TK,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        out_TN,
        rows,
        columns,
        depth,
        bias_N is not None,
        depth % tile.depth == 0,
        tile.rows,
        tile.columns,
        tile.depth,
        _GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_TN
