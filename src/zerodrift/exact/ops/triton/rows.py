"""Ops on rows, one program per row: RMS norm.

The number of warps, which decides how a row is summed, is a function of the row's length alone. torch's own kernels
choose it by the number of rows too. Shapes: R rows, H hidden size.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def normed(x, w, eps, SIZE: tl.constexpr, KIND: tl.constexpr):
    """A row in fp32, zero beyond SIZE, over its root mean square, times w."""
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps))
    # Rounded before the weight is applied, as the model families do.
    return (y.to(KIND).to(tl.float32) * w.to(tl.float32)).to(KIND)


@triton.jit
def _norm_kernel(x_ptr, w_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=inside, other=0.0)
    y = normed(x, w, eps, SIZE, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + column, y, mask=inside)


def warps_for(size: int) -> int:
    """Of a program that sums a row of so many numbers."""
    return 1 if size <= 256 else 4 if size <= 4096 else 8


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean x² + ε) · weight."""
    size = x.shape[-1]
    x_RH = x.reshape(-1, size).contiguous()
    out_RH = torch.empty_like(x_RH)
    _norm_kernel[(len(x_RH),)](
        x_RH,
        weight_H,
        out_RH,
        eps,
        size,
        triton.next_power_of_2(size),
        num_warps=warps_for(size),
        # Products that are summed are not fused with the sum: what stands in another kernel has the same bits.
        enable_fp_fusion=False,
    )
    return out_RH.view(x.shape)
