"""Ops on rows, one program per row: RMS norm and log-softmax.

The number of warps, which decides how a row is summed, is a function of the row's length alone. torch's own kernels
choose it by the number of rows too. Shapes: R rows, H hidden size, V vocabulary.
"""

import torch
import triton
import triton.language as tl

_CHUNK = 4096
"""Vocabulary entries reduced in one go."""


@triton.jit
def _norm_kernel(x_ptr, w_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    variance = tl.sum(x * x, 0) / SIZE
    y = x * (1.0 / tl.sqrt(variance + eps))
    w = tl.load(w_ptr + column, mask=inside, other=0.0)
    # Rounded before the weight is applied, as the model families do.
    y = y.to(out_ptr.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    tl.store(out_ptr + row + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean x² + ε) · weight."""
    size = x.shape[-1]
    x_RH = x.reshape(-1, size).contiguous()
    out_RH = torch.empty_like(x_RH)
    warps = 1 if size <= 256 else 4 if size <= 4096 else 8
    _norm_kernel[(len(x_RH),)](
        x_RH, weight_H, out_RH, eps, size, triton.next_power_of_2(size), num_warps=warps
    )
    return out_RH.view(x.shape)


@triton.jit
def _log_softmax_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, SIZE, BLOCK):
        x = tl.load(x_ptr + row + begin + column, mask=begin + column < SIZE, other=float("-inf"))
        most = tl.maximum(most, x)
    highest = tl.max(most, 0)
    total = 0.0
    for begin in range(0, SIZE, BLOCK):
        x = tl.load(x_ptr + row + begin + column, mask=begin + column < SIZE, other=float("-inf"))
        total += tl.sum(tl.exp(x - highest), 0)
    log_total = tl.log(total)
    for begin in range(0, SIZE, BLOCK):
        x = tl.load(x_ptr + row + begin + column, mask=begin + column < SIZE, other=0.0)
        tl.store(out_ptr + row + begin + column, x - highest - log_total, mask=begin + column < SIZE)


def log_softmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """In fp32; -inf stays -inf."""
    logits_RV = logits_RV.float().contiguous()
    out_RV = torch.empty_like(logits_RV)
    _log_softmax_kernel[(len(logits_RV),)](logits_RV, out_RV, logits_RV.shape[1], _CHUNK, num_warps=8)
    return out_RV
