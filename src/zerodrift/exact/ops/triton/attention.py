"""Attention on pages: blocks of 64 keys from absolute position 0, in order, one program per tile of queries.

A softmax that is carried along inside of splits of 512 keys, and an ordered merge of splits: a formula that a second
kernel could take over for long contexts without changing a bit. Weights are summed as they are used, rounded, by a product
with ones: products have one order whatever the tile, where the order of `tl.sum` is up to how a tile lies on its warps. 64
keys per block is part of the contract; tiles are not, nor where keys lie: in pages, or token by token as a trainer has them.
Shapes: T tokens, H query heads, C kv heads, D head size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 64
SPLIT = 512
LOG2_E = 1.4426950408889634


class QueryTile(NamedTuple):
    """How many rows (token, query head of the group) one program computes, with how many warps and pipeline stages."""

    rows: int
    warps: int
    stages: int


DECODE, PREFILL = QueryTile(16, 2, 3), QueryTile(64, 4, 2)
WIDE_DECODE, WIDE_PREFILL = QueryTile(16, 8, 2), QueryTile(64, 8, 2)
"""For heads of 256: more warps, since the sums of both, twice, do not fit the registers of two or four."""


def tile_for(most_rows: int, size: int) -> QueryTile:
    """For sequences of so many rows at most, with heads of `size`."""
    decode, prefill = (DECODE, PREFILL) if size <= 128 else (WIDE_DECODE, WIDE_PREFILL)
    return decode if most_rows <= decode.rows else prefill


class Tiles(NamedTuple):
    """Of one kind, over the sequences of a step."""

    tile: QueryTile
    sequence: torch.Tensor
    first_row: torch.Tensor


class Layout(NamedTuple):
    """Where the queries and keys of each sequence are."""

    start: torch.Tensor
    """Its first token."""
    tokens: torch.Tensor
    first: torch.Tensor
    """Position of its first token."""
    table_start: torch.Tensor
    """Where its blocks begin in `tables`."""
    tables: torch.Tensor
    """Not looked at where keys lie token by token."""


@triton.jit
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sums_ptr,
    tile_sequence,
    tile_row,
    starts,
    counts,
    firsts,
    table_starts,
    tables,
    scale,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    KEEP: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    sequence = tl.load(tile_sequence + tile)
    count = tl.load(counts + sequence)
    first = tl.load(firsts + sequence)
    start = tl.load(starts + sequence)
    table = tables + tl.load(table_starts + sequence)
    row = tl.load(tile_row + tile) + tl.arange(0, BM)
    token = row // group
    inside = token < count
    position = first + token
    d = tl.arange(0, SIZE)
    head_row = (start + token).to(tl.int64) * HEADS + kv_head * group + row % group
    at = head_row * SIZE
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    last = tl.max(tl.where(inside, position, 0), 0)
    low = 0
    if WINDOW > 0:
        earliest = tl.min(tl.where(inside, position, last), 0)
        low = tl.maximum(earliest - WINDOW + 1, 0) // BN * BN
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, SIZE), tl.float32)
    ones = tl.full((BN, 16), 1.0, v_ptr.dtype.element_ty)
    for split in range(low // SPAN * SPAN, last + 1, SPAN):
        m = tl.full((BM,), float("-inf"), tl.float32)
        s = tl.zeros((BM,), tl.float32)
        o = tl.zeros((BM, SIZE), tl.float32)
        for begin in range(tl.maximum(split, low), tl.minimum(split + SPAN, last + 1), BN):
            n = begin + tl.arange(0, BN)
            there = n < first + count
            if PAGE == 0:
                first_row = (start + begin).to(tl.int64) * KV_HEADS + kv_head
                where = first_row * SIZE + tl.arange(0, BN) * (KV_HEADS * SIZE)
            elif PAGE % BN == 0:
                # One look at the table, one base: a pointer for each key spilled 856 bytes.
                block = tl.load(table + begin // PAGE).to(tl.int64)
                first_row = (block * KV_HEADS + kv_head) * PAGE + begin % PAGE
                where = first_row * SIZE + tl.arange(0, BN) * SIZE
            else:
                block = tl.load(table + n // PAGE, mask=there, other=0).to(tl.int64)
                where = ((block * KV_HEADS + kv_head) * PAGE + n % PAGE) * SIZE
            k = tl.load(k_ptr + where[None, :] + d[:, None], mask=there[None, :], other=0.0)
            x = tl.dot(q, k) * scale
            seen = n[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            x = tl.where(seen, x, float("-inf"))
            higher = tl.maximum(m, tl.max(x, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.where(m == float("-inf"), 0.0, tl.exp2(m - base))
            p = tl.exp2(x - base[:, None]).to(ones.dtype)
            v = tl.load(v_ptr + where[:, None] + d[None, :], mask=there[:, None], other=0.0)
            s = s * shrink + tl.max(tl.dot(p, ones), 1)
            o = o * shrink[:, None] + tl.dot(p, v)
            m = higher
        higher = tl.maximum(most, m)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        old = tl.where(most == float("-inf"), 0.0, tl.exp2(most - base))
        new = tl.where(m == float("-inf"), 0.0, tl.exp2(m - base))
        total = total * old + s * new
        out = out * old[:, None] + o * new[:, None]
        most = higher
    out = out / total[:, None]
    tl.store(out_ptr + at[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    if KEEP:
        tl.store(sums_ptr + head_row, most + tl.log2(total), mask=inside)


def attend(
    q_THD: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    layout: Layout,
    tiles: Tiles,
    scale: float,
    window: int | None,
    out_THD: torch.Tensor,
    sums_TH: torch.Tensor | None = None,
) -> None:
    """Write the rows of `tiles` into `out`; keys and values are pages [blocks, C, page, D], or [T, C, D] beside the queries.

    `sums` takes, for a backward, the log2 of each row's sum over keys of 2^(score · log2 e)."""
    _, heads, size = q_THD.shape
    kv_heads, page = kv[0].shape[1], kv[0].shape[2] if kv[0].dim() == 4 else 0
    _attend_kernel[(len(tiles.sequence), kv_heads)](
        q_THD,
        kv[0],
        kv[1],
        out_THD,
        out_THD if sums_TH is None else sums_TH,
        tiles.sequence,
        tiles.first_row,
        *layout,
        scale * LOG2_E,
        window or 0,
        heads,
        kv_heads,
        size,
        page,
        tiles.tile.rows,
        BLOCK,
        SPLIT,
        sums_TH is not None,
        num_warps=tiles.tile.warps,
        num_stages=tiles.tile.stages,
    )
