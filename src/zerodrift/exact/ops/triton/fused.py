"""What stands between the products of a layer, fused: each kernel rounds where the ops that it takes together round.

Sums are those of `rows.py`, by the same function over the same number of warps. Nothing is contracted: a product that is
rounded before it is added stays so. Shapes: T tokens, H query heads, C kv heads, D head size, R rows,
I width of the feed-forward part.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from zerodrift.exact.ops.interface import NormGain
from zerodrift.exact.ops.triton.rows import gained, normed, warps_for


@triton.jit
def _add_norm_kernel(
    hidden_ptr,
    added_ptr,
    added_w_ptr,
    w_ptr,
    sum_ptr,
    out_ptr,
    added_eps,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM_ADDED: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    kind: tl.constexpr = out_ptr.dtype.element_ty
    added = tl.load(added_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if NORM_ADDED:
        added_w = tl.load(added_w_ptr + column, mask=inside, other=0.0)
        added = normed(added, added_w, added_eps, SIZE, kind, ONE_PLUS).to(tl.float32)
    x = tl.load(hidden_ptr + row + column, mask=inside, other=0.0).to(tl.float32) + added
    total = x.to(kind)
    tl.store(sum_ptr + row + column, total, mask=inside)
    w = tl.load(w_ptr + column, mask=inside, other=0.0)
    y = normed(total.to(tl.float32), w, eps, SIZE, kind, ONE_PLUS)
    tl.store(out_ptr + row + column, y, mask=inside)


@triton.jit
def _silu_times_kernel(gate_ptr, up_ptr, out_ptr, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    # As torch has it: not Triton's fast exponential and quotient, nor libdevice's quotient, which takes subnormals for 0.
    y = tl.div_rn(x, 1.0 + libdevice.exp(-x)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, (y * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_tanh_times_kernel(
    gate_ptr, up_ptr, out_ptr, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    # torch's formula, contracted where nvcc contracts it.
    inner = 0.7978845608028654 * tl.fma(x * x * x, 0.044715, x)
    y = (0.5 * x * (1.0 + libdevice.tanh(inner))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, (y * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(x, partner, cos, sin, d, SIZE: tl.constexpr, KIND: tl.constexpr):
    partner = tl.where(d < SIZE // 2, -partner.to(tl.float32), partner.to(tl.float32))
    straight = (x.to(tl.float32) * cos).to(KIND).to(tl.float32)
    return (straight + (partner * sin).to(KIND).to(tl.float32)).to(KIND)


@triton.jit
def _normed_head(x, partner, w_ptr, d, eps, SIZE: tl.constexpr, KIND: tl.constexpr, ONE_PLUS: tl.constexpr):
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    own = gained(x * scale, tl.load(w_ptr + d), KIND, ONE_PLUS)
    return own, gained(partner * scale, tl.load(w_ptr + (d + SIZE // 2) % SIZE), KIND, ONE_PLUS)


@triton.jit
def _heads_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight,
    k_weight,
    cos_ptr,
    sin_ptr,
    rows_ptr,
    q_out,
    k_pages,
    v_pages,
    q_row,
    k_row,
    v_row,
    eps,
    tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1)
    kind: tl.constexpr = q_out.dtype.element_ty
    d = tl.arange(0, SIZE)
    partner_d = (d + SIZE // 2) % SIZE
    # Unrolled, without a branch: the loads of all tokens are under way at once.
    for number in tl.static_range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + number
        live = (token < tokens) & (d < SIZE)
        own = tl.maximum(head - HEADS, 0) % KV_HEADS
        row = tl.load(rows_ptr + token * KV_HEADS + own, mask=token < tokens, other=0)
        if head >= HEADS + KV_HEADS:
            v = tl.load(v_ptr + token * v_row + own * SIZE + d, mask=live)
            tl.store(v_pages + row * SIZE + d, v, mask=live)
        else:
            cos = tl.load(cos_ptr + token * SIZE + d, mask=live).to(tl.float32)
            sin = tl.load(sin_ptr + token * SIZE + d, mask=live).to(tl.float32)
            if head >= HEADS:
                place = k_ptr + token * k_row + own * SIZE
                weight, to = k_weight, k_pages + row * SIZE
            else:
                place = q_ptr + token * q_row + head * SIZE
                weight, to = q_weight, q_out + (token * HEADS + head) * SIZE
            x, partner = tl.load(place + d, mask=live), tl.load(place + partner_d, mask=live)
            if NORM:
                x, partner = _normed_head(x, partner, weight, d, eps, SIZE, kind, ONE_PLUS)
            tl.store(to + d, _rotated(x, partner, cos, sin, d, SIZE, kind), mask=live)


def add_norm(
    hidden_RH: torch.Tensor, added_RH: torch.Tensor, gain: NormGain, of_added: NormGain | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden + added, and the norm of that; what is added is normed before it is, where it has a gain of its own."""
    sum_RH, out_RH = torch.empty_like(hidden_RH), torch.empty_like(hidden_RH)
    size, first = hidden_RH.shape[-1], gain if of_added is None else of_added
    assert first.one_plus == gain.one_plus, "norms of one family have one kind of gain"
    _add_norm_kernel[(len(hidden_RH),)](
        hidden_RH,
        added_RH,
        first.weight_H,
        gain.weight_H,
        sum_RH,
        out_RH,
        first.eps,
        gain.eps,
        size,
        triton.next_power_of_2(size),
        of_added is not None,
        gain.one_plus,
        num_warps=warps_for(size),
        enable_fp_fusion=False,
    )
    return sum_RH, out_RH


def silu_times(gate_TI: torch.Tensor, up_TI: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, each rounded; rows may stand apart."""
    return _times(_silu_times_kernel, gate_TI, up_TI, fused=False)


def gelu_tanh_times(gate_TI: torch.Tensor, up_TI: torch.Tensor) -> torch.Tensor:
    """The same for gelu by tanh."""
    return _times(_gelu_tanh_times_kernel, gate_TI, up_TI, fused=True)


def _times(kernel: Any, gate_TI: torch.Tensor, up_TI: torch.Tensor, *, fused: bool) -> torch.Tensor:
    """`fused`: whether products and sums inside of the device library's functions are contracted, as nvcc does."""
    rows, size = gate_TI.shape
    out_TI = gate_TI.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    kernel[(rows, triton.cdiv(size, block))](
        gate_TI,
        up_TI,
        out_TI,
        gate_TI.stride(0),
        up_TI.stride(0),
        size,
        block,
        num_warps=4,
        enable_fp_fusion=fused,
    )
    return out_TI


def heads(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norms: tuple[NormGain, NormGain] | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Queries [T, H, D], normed by head where the model does and rotated; keys, treated alike, and values go to `rows` of the
    pages. `rotary` is cosines and sines [T, D]. Tokens of `qkv` may stand apart, heads and their numbers not."""
    q_THD, k_TCD, _ = qkv
    tokens, heads_, size = q_THD.shape
    kv_heads, out_THD = k_TCD.shape[1], q_THD.new_empty(q_THD.shape)
    of_q, of_k = norms if norms is not None else (NormGain(q_THD, 0.0), NormGain(q_THD, 0.0))
    assert (of_q.eps, of_q.one_plus) == (of_k.eps, of_k.one_plus), "norms of one family are alike"
    # A program for each token of a prefill of 8,192 took five times as long as its memory.
    at_once = 1 if tokens <= 64 else 2 if tokens <= 512 else 8
    _heads_kernel[(triton.cdiv(tokens, at_once), heads_ + 2 * kv_heads)](
        *qkv,
        of_q.weight_H,
        of_k.weight_H,
        *rotary,
        rows,
        out_THD,
        *pages,
        *(part.stride(0) for part in qkv),
        of_q.eps,
        tokens,
        heads_,
        kv_heads,
        size,
        norms is not None,
        of_q.one_plus,
        at_once,
        num_warps=warps_for(size),
        enable_fp_fusion=False,
    )
    return out_THD
