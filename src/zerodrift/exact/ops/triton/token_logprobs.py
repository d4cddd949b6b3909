"""Log-probabilities of given tokens, and the gradient of their logits: one number for each row instead of a row of them.

Row sums are those that a draw and the log-softmax are made of (`vocabulary.row_sums`), and the last subtraction is theirs too.
Shapes: R rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from zerodrift.exact.ops.triton.vocabulary import CHUNK, WARPS, row_sums


@triton.jit
def _pick_kernel(logits_ptr, scale_ptr, row_ptr, tokens_ptr, out_ptr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logit = tl.load(logits_ptr + row * SIZE + tl.load(tokens_ptr + row)) * tl.load(scale_ptr + row)
    highest, log_total = tl.load(row_ptr + row * 4).to(tl.float32), tl.load(row_ptr + row * 4 + 1)
    tl.store(out_ptr + row, ((logit - highest).to(tl.float64) - log_total).to(tl.float32))


@triton.jit
def _grad_kernel(
    logits_ptr,
    scale_ptr,
    row_ptr,
    tokens_ptr,
    grad_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    scale = tl.load(scale_ptr + row)
    highest, log_total = tl.load(row_ptr + row * 4).to(tl.float32), tl.load(row_ptr + row * 4 + 1)
    x = tl.load(logits_ptr + row * SIZE + column, mask=column < SIZE, other=0.0) * scale
    p = tl.exp(x - highest - log_total.to(tl.float32))
    taken = tl.where(column == tl.load(tokens_ptr + row), 1.0, 0.0)
    grad = tl.load(grad_ptr + row) * scale * (taken - p)
    tl.store(out_ptr + row * SIZE + column, grad.to(out_ptr.dtype.element_ty), mask=column < SIZE)


def pick(
    logits_RV: torch.Tensor, scale_R: torch.Tensor, tokens_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `tokens` under logits times `scale`, and the sums [R, 4] that `gradient` wants."""
    row_R4 = row_sums(logits_RV, scale_R).row_R4
    out_R = torch.empty(len(logits_RV), device=logits_RV.device)
    _pick_kernel[(len(logits_RV),)](
        logits_RV,
        scale_R,
        row_R4,
        tokens_R,
        out_R,
        logits_RV.shape[1],
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out_R, row_R4


def gradient(
    logits_RV: torch.Tensor,
    scale_R: torch.Tensor,
    row_R4: torch.Tensor,
    tokens_R: torch.Tensor,
    grad_R: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Of the logits, in `dtype`: grad · scale · (1 for the token − p)."""
    out_RV = torch.empty_like(logits_RV, dtype=dtype)
    rows, size = logits_RV.shape
    _grad_kernel[(rows, triton.cdiv(size, CHUNK))](
        logits_RV, scale_R, row_R4, tokens_R, grad_R, out_RV, size, CHUNK, num_warps=WARPS
    )
    return out_RV
