"""Gradients of attention over whole sequences, without atomics: each number is one program's, added up in one order.

P is made again from the forward's log-sums, and with dO and δ = rowsum(dO ∘ O) gives dS = P ∘ (dO Vᵀ − δ). One kernel
goes over keys for a tile of queries and gives dQ, one goes over queries for a tile of keys and gives dK and dV; the query
heads of a kv head are rows of one sequence, so that their sum is part of that walk. Weights and dS are rounded to the model's
dtype before they are multiplied, sums are fp32. What tiles there are moves last bits here, and none of the forward.
Shapes: T tokens, H query heads, C kv heads, D head size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from zerodrift.exact.ops.triton.attention import LOG2_E, Layout, Tiles


class WalkTile(NamedTuple):
    """Rows (or keys) that a program keeps, those that it takes at a time, warps and pipeline stages."""

    keeps: int
    takes: int
    warps: int
    stages: int


class WalkTiles(NamedTuple):
    """Of both kernels."""

    over_keys: WalkTile
    over_queries: WalkTile


_NARROW = WalkTiles(WalkTile(128, 64, 8, 3), WalkTile(64, 64, 4, 2))
_WIDE = WalkTiles(WalkTile(64, 64, 8, 2), WalkTile(64, 32, 8, 3))
"""For heads of 256, whose rows are twice as long: what a program keeps and takes has to fit 227 KiB and its registers."""
_DELTA_ROWS = 32


def walk_tiles(size: int) -> WalkTiles:
    """For heads of `size`."""
    return _NARROW if size <= 128 else _WIDE


@triton.jit
def _delta_kernel(out_ptr, dout_ptr, delta_ptr, rows, SIZE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    out = tl.load(out_ptr + at, mask=row[:, None] < rows, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + at, mask=row[:, None] < rows, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(out * dout, 1), mask=row < rows)


@triton.jit
def _dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    sums_ptr,
    delta_ptr,
    dq_ptr,
    tile_sequence,
    tile_row,
    starts,
    counts,
    scale,
    scale_log2,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    sequence = tl.load(tile_sequence + tile)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    row = tl.load(tile_row + tile) + tl.arange(0, BM)
    position = row // group
    inside = position < count
    d = tl.arange(0, SIZE)
    head_row = (start + position).to(tl.int64) * HEADS + kv_head * group + row % group
    at = head_row[:, None] * SIZE + d[None, :]
    q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
    dout = tl.load(dout_ptr + at, mask=inside[:, None], other=0.0)
    sums = tl.load(sums_ptr + head_row, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + head_row, mask=inside, other=0.0)
    last = tl.max(tl.where(inside, position, 0), 0)
    low = 0
    if WINDOW > 0:
        earliest = tl.min(tl.where(inside, position, last), 0)
        low = tl.maximum(earliest - WINDOW + 1, 0) // BN * BN
    dq = tl.zeros((BM, SIZE), tl.float32)
    for begin in range(low, last + 1, BN):
        n = begin + tl.arange(0, BN)
        there = n < count
        where = ((start + n).to(tl.int64) * KV_HEADS + kv_head) * SIZE
        k = tl.load(k_ptr + where[:, None] + d[None, :], mask=there[:, None], other=0.0)
        v = tl.load(v_ptr + where[:, None] + d[None, :], mask=there[:, None], other=0.0)
        seen = n[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        x = tl.dot(q, tl.trans(k)) * scale_log2 - sums[:, None]
        p = tl.exp2(tl.where(seen, x, float("-inf")))
        ds = p * (tl.dot(dout, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    sums_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    tile_sequence,
    tile_key,
    starts,
    counts,
    scale,
    scale_log2,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    sequence = tl.load(tile_sequence + tile)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    first_key = tl.load(tile_key + tile)
    n = first_key + tl.arange(0, BN)
    there = n < count
    d = tl.arange(0, SIZE)
    where = ((start + n).to(tl.int64) * KV_HEADS + kv_head)[:, None] * SIZE + d[None, :]
    k = tl.load(k_ptr + where, mask=there[:, None], other=0.0)
    v = tl.load(v_ptr + where, mask=there[:, None], other=0.0)
    dk, dv = tl.zeros((BN, SIZE), tl.float32), tl.zeros((BN, SIZE), tl.float32)
    # The first query that sees a key stands at its position.
    end = count * group
    if WINDOW > 0:
        end = tl.minimum(end, (first_key + BN - 1 + WINDOW) * group)
    for begin in range(first_key * group, end, BM):
        row = begin + tl.arange(0, BM)
        position = row // group
        inside = position < count
        head_row = (start + position).to(tl.int64) * HEADS + kv_head * group + row % group
        at = head_row[:, None] * SIZE + d[None, :]
        q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
        dout = tl.load(dout_ptr + at, mask=inside[:, None], other=0.0)
        sums = tl.load(sums_ptr + head_row, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + head_row, mask=inside, other=0.0)
        seen = (n[:, None] <= position[None, :]) & inside[None, :]
        if WINDOW > 0:
            seen = seen & (n[:, None] > position[None, :] - WINDOW)
        x = tl.dot(k, tl.trans(q)) * scale_log2 - sums[None, :]
        p = tl.exp2(tl.where(seen, x, float("-inf")))
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        ds = p * (tl.dot(v, tl.trans(dout)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + where, (dk * scale).to(dk_ptr.dtype.element_ty), mask=there[:, None])
    tl.store(dv_ptr + where, dv.to(dv_ptr.dtype.element_ty), mask=there[:, None])


class Saved(NamedTuple):
    """Of a forward: all [T, heads, D] and contiguous, but for the log-sums [T, H]."""

    q_THD: torch.Tensor
    k_TCD: torch.Tensor
    v_TCD: torch.Tensor
    out_THD: torch.Tensor
    sums_TH: torch.Tensor


class Walks(NamedTuple):
    """Where the programs of both kernels begin."""

    layout: Layout
    queries: Tiles
    keys: Tiles


def attend_backward(
    saved: Saved, dout_THD: torch.Tensor, walks: Walks, scale: float, window: int | None, *, covered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV; 0 for tokens of no sequence, of which there are none where all are `covered`."""
    q_THD, k_TCD, v_TCD, out_THD, sums_TH = saved
    dout_THD = dout_THD.contiguous()
    tokens, heads, size = q_THD.shape
    kv_heads, delta_TH = k_TCD.shape[1], torch.empty_like(sums_TH)
    dq_THD, dk_TCD, dv_TCD = (
        torch.empty_like(part) if covered else torch.zeros_like(part) for part in saved[:3]
    )
    _delta_kernel[(triton.cdiv(tokens * heads, _DELTA_ROWS),)](
        out_THD, dout_THD, delta_TH, tokens * heads, size, _DELTA_ROWS
    )
    read = (q_THD, k_TCD, v_TCD, dout_THD, sums_TH, delta_TH)
    numbers = (scale, scale * LOG2_E, window or 0, heads, kv_heads, size)
    for kernel, written, tiles, (keeps, takes, warps, stages) in (
        (_dkv_kernel, (dk_TCD, dv_TCD), walks.keys, walk_tiles(size).over_queries),
        (_dq_kernel, (dq_THD,), walks.queries, walk_tiles(size).over_keys),
    ):
        rows, keys = (takes, keeps) if kernel is _dkv_kernel else (keeps, takes)
        kernel[(len(tiles.sequence), kv_heads)](
            *read,
            *written,
            tiles.sequence,
            tiles.first_row,
            walks.layout.start,
            walks.layout.tokens,
            *numbers,
            rows,
            keys,
            num_warps=warps,
            num_stages=stages,
        )
    return dq_THD, dk_TCD, dv_TCD
