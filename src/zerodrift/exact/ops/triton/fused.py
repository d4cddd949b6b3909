"""What stands between the products of a layer, fused: each kernel rounds where the ops that it takes together round.

Sums are those of `rows.py`, by the same function over the same number of warps. Nothing is contracted: a product that is
rounded before it is added stays so. Shapes: T tokens, H query heads, C kv heads, D head size, R rows,
I width of the feed-forward part.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from zerodrift.exact.ops.triton.rows import normed, warps_for


@triton.jit
def _add_norm_kernel(
    hidden_ptr, added_ptr, w_ptr, sum_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(hidden_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(added_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    total = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + column, total, mask=inside)
    w = tl.load(w_ptr + column, mask=inside, other=0.0)
    y = normed(total.to(tl.float32), w, eps, SIZE, out_ptr.dtype.element_ty)
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
def _rotated(x, partner, cos, sin, d, SIZE: tl.constexpr, KIND: tl.constexpr):
    partner = tl.where(d < SIZE // 2, -partner.to(tl.float32), partner.to(tl.float32))
    straight = (x.to(tl.float32) * cos).to(KIND).to(tl.float32)
    return (straight + (partner * sin).to(KIND).to(tl.float32)).to(KIND)


@triton.jit
def _normed_head(x, partner, w_ptr, partner_w_ptr, eps, SIZE: tl.constexpr, KIND: tl.constexpr):
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    x = ((x * scale).to(KIND).to(tl.float32) * tl.load(w_ptr).to(tl.float32)).to(KIND)
    partner_w = tl.load(partner_w_ptr).to(tl.float32)
    return x, ((partner * scale).to(KIND).to(tl.float32) * partner_w).to(KIND)


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
                x, partner = _normed_head(x, partner, weight + d, weight + partner_d, eps, SIZE, kind)
            tl.store(to + d, _rotated(x, partner, cos, sin, d, SIZE, kind), mask=live)


def add_norm(
    hidden_RH: torch.Tensor, added_RH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden + added, and the norm of that."""
    sum_RH, out_RH = torch.empty_like(hidden_RH), torch.empty_like(hidden_RH)
    size = hidden_RH.shape[-1]
    _add_norm_kernel[(len(hidden_RH),)](
        hidden_RH,
        added_RH,
        weight_H,
        sum_RH,
        out_RH,
        eps,
        size,
        triton.next_power_of_2(size),
        num_warps=warps_for(size),
        enable_fp_fusion=False,
    )
    return sum_RH, out_RH


def silu_times(gate_TI: torch.Tensor, up_TI: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, each rounded; rows may stand apart."""
    rows, size = gate_TI.shape
    out_TI = gate_TI.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    _silu_times_kernel[(rows, triton.cdiv(size, block))](
        gate_TI,
        up_TI,
        out_TI,
        gate_TI.stride(0),
        up_TI.stride(0),
        size,
        block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_TI


def heads(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Queries [T, H, D], normed by head where the model does and rotated; keys, treated alike, and values go to `rows` of the
    pages. `rotary` is cosines and sines [T, D]. Tokens of `qkv` may stand apart, heads and their numbers not."""
    q_THD, k_TCD, _ = qkv
    tokens, heads_, size = q_THD.shape
    kv_heads, out_THD = k_TCD.shape[1], q_THD.new_empty(q_THD.shape)
    q_weight, k_weight, eps = norms if norms is not None else (q_THD, q_THD, 0.0)
    # A program for each token of a prefill of 8,192 took five times as long as its memory.
    at_once = 1 if tokens <= 64 else 2 if tokens <= 512 else 8
    _heads_kernel[(triton.cdiv(tokens, at_once), heads_ + 2 * kv_heads)](
        *qkv,
        q_weight,
        k_weight,
        *rotary,
        rows,
        out_THD,
        *pages,
        *(part.stride(0) for part in qkv),
        eps,
        tokens,
        heads_,
        kv_heads,
        size,
        norms is not None,
        at_once,
        num_warps=warps_for(size),
        enable_fp_fusion=False,
    )
    return out_THD
