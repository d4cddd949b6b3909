"""log-softmax over the vocabulary, the last step of every logprob.

On a CPU torch's own holds for every row count and thread count seen, and is asked about each when it first occurs: a sampler
works on groups of a step's rows, whose numbers no product has. On a GPU it reads a row
in steps that depend on where the row begins in memory, so there it is chunks of ids, added in order. Shapes: R rows, V vocabulary.
"""

from importlib import import_module
from typing import Any

import torch

from zerodrift.exact.ops.cpu.proof import require_rows


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: torch.Tensor) -> torch.Tensor:
        out_RV: torch.Tensor = import_module("zerodrift.exact.ops.triton.vocabulary").log_softmax(logits_RV)
        ctx.save_for_backward(out_RV)
        return out_RV

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (out_RV,) = ctx.saved_tensors
        grad_RV: torch.Tensor = grads[0] - out_RV.exp() * grads[0].sum(-1, keepdim=True)
        return grad_RV


def log_softmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """Differentiable, row by row."""
    if logits_RV.is_cuda:
        out_RV: torch.Tensor = _LogSoftmax.apply(logits_RV)  # type: ignore[no-untyped-call]
        return out_RV
    if logits_RV.dtype is torch.float32:
        require_rows("log-softmax", _torchs_own, logits_RV.shape[-1], len(logits_RV))
    return _torchs_own(logits_RV)


def _torchs_own(logits_RV: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits_RV, dim=-1)
