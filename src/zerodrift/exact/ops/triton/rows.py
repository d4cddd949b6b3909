"""Ops on rows, one program per row: RMS norm, and its backward over some rows at a time.

The number of warps, which decides how a row is summed, is a function of the row's length alone. torch's own kernels
choose it by the number of rows too. Families differ in the gain: w, on a row that is rounded first, or 1 + w (Gemma),
rounded once at the end. Shapes: R rows, H hidden size.
"""

import torch
import triton
import triton.language as tl

from zerodrift.exact.ops.interface import NormGain


@triton.jit
def gained(y, w, KIND: tl.constexpr, ONE_PLUS: tl.constexpr):
    """A row that is over its root mean square, in fp32, times its gain."""
    if ONE_PLUS:
        out = (y * (1.0 + w.to(tl.float32))).to(KIND)
    else:
        # Rounded before the weight is applied, as most model families do.
        out = (y.to(KIND).to(tl.float32) * w.to(tl.float32)).to(KIND)
    return out


@triton.jit
def normed(x, w, eps, SIZE: tl.constexpr, KIND: tl.constexpr, ONE_PLUS: tl.constexpr):
    """A row in fp32, zero beyond SIZE, over its root mean square, times its gain."""
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps))
    return gained(y, w, KIND, ONE_PLUS)


@triton.jit
def _norm_kernel(x_ptr, w_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ONE_PLUS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=inside, other=0.0)
    y = normed(x, w, eps, SIZE, out_ptr.dtype.element_ty, ONE_PLUS)
    tl.store(out_ptr + row + column, y, mask=inside)


def warps_for(size: int) -> int:
    """Of a program that sums a row of so many numbers."""
    return 1 if size <= 256 else 4 if size <= 4096 else 8


def rms_norm(x: torch.Tensor, gain: NormGain) -> torch.Tensor:
    """x / √(mean x² + ε) times the gain."""
    size = x.shape[-1]
    x_RH = x.reshape(-1, size).contiguous()
    out_RH = torch.empty_like(x_RH)
    _norm_kernel[(len(x_RH),)](
        x_RH,
        gain.weight_H,
        out_RH,
        gain.eps,
        size,
        triton.next_power_of_2(size),
        gain.one_plus,
        num_warps=warps_for(size),
        # Products that are summed are not fused with the sum: what stands in another kernel has the same bits.
        enable_fp_fusion=False,
    )
    return out_RH.view(x.shape)


_BACKWARD_PROGRAMS = 1056
"""Eight for each multiprocessor of an H200; a constant, so that sums over rows have one order on any GPU."""
_BACKWARD_NUMBERS = 4096
"""Of rows that a program holds at a time."""


@triton.jit
def _norm_backward_kernel(
    x_ptr,
    w_ptr,
    grad_ptr,
    dx_ptr,
    dw_ptr,
    eps,
    rows,
    rows_of_program,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * rows_of_program
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    w = tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ONE_PLUS:
        w += 1.0
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, rows_of_program, ROWS):
        number = begin + tl.arange(0, ROWS)
        row = first + number
        live = ((number < rows_of_program) & (row < rows))[:, None] & inside[None, :]
        at = row[:, None] * SIZE + column[None, :]
        x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / SIZE + eps)
        y = x * scale[:, None]
        along = grad * w[None, :]
        dx = scale[:, None] * (along - y * (tl.sum(along * y, 1) / SIZE)[:, None])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=live)
        dw += grad * y
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * SIZE + column, tl.sum(dw, 0), mask=inside)


def rms_norm_backward(
    x: torch.Tensor, gain: NormGain, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight; what is added up over rows is added in one order."""
    size = x.shape[-1]
    x_RH, grad_RH = x.reshape(-1, size).contiguous(), grad.reshape(-1, size).contiguous()
    block = triton.next_power_of_2(size)
    at_once = max(1, _BACKWARD_NUMBERS // block)
    stretch = triton.cdiv(triton.cdiv(len(x_RH), at_once), _BACKWARD_PROGRAMS) * at_once
    programs = triton.cdiv(len(x_RH), stretch)
    dx_RH, dw_PH = torch.empty_like(x_RH), x_RH.new_empty(programs, size, dtype=torch.float32)
    _norm_backward_kernel[(programs,)](
        x_RH,
        gain.weight_H,
        grad_RH,
        dx_RH,
        dw_PH,
        gain.eps,
        len(x_RH),
        stretch,
        size,
        block,
        at_once,
        gain.one_plus,
        num_warps=4 if block <= 4096 else 8,
    )
    return dx_RH.view(x.shape), dw_PH.sum(0).to(gain.weight_H.dtype)
