"""The head of a trainer's forward on a GPU: the rows of all completions in few products, one number kept for each.

Logits exist some rows at a time, and are made again for the backward: of a vocabulary of 151,936, those of 12,288 tokens would
take 7.5 GB, and torch's own log-softmax and gather some ten walks through them. Nothing but a temperature may stand
between logits and log-probabilities here; what is truncated or penalised takes `logprobs.processed`, completion by completion.
Shapes: R rows, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from zerodrift.core.completion import LogprobKind
from zerodrift.core.request import SamplingParams
from zerodrift.exact.preparation import ops_of, require_gathered
from zerodrift.models.family.parts import ModelParts

LOGITS_AT_ONCE = 2**28
"""1 GB in fp32. The weight's gradient is read and written for each cut: a quarter of it doubled the backward's time there."""


def can_pack(model: Any) -> bool:
    """Whether the head of `model` is a product on a GPU and nothing else."""
    parts = ModelParts(model)
    on_gpu = ops_of(model).device == "cuda"
    return on_gpu and parts.head.bias is None and parts.family.logit_cap(model.config) is None


def temperature_of(params: SamplingParams, kind: LogprobKind) -> float | None:
    """What logits are divided by; None where more is done to them."""
    if kind is LogprobKind.RAW:
        return 1.0
    changed = params.truncates or params.penalises or params.logit_bias or params.min_tokens
    return None if changed else params.temperature or 1.0


def packed_logprobs(
    model: Any, hidden_RH: torch.Tensor, tokens: Sequence[int], temperatures: Sequence[float]
) -> torch.Tensor:
    """Of `tokens`, each by the hidden state that predicts it and at its temperature; differentiable."""
    require_gathered(model)
    head = ModelParts(model).head
    # As torch divides by a number on a GPU: it multiplies with the fp32 reciprocal.
    scale_R = torch.tensor(temperatures, dtype=torch.float32).reciprocal_().to(hidden_RH.device)
    tokens_R = torch.tensor(tokens, device=hidden_RH.device)
    how = (ops_of(model), head.exact_pack.of(head.weight), tokens_R, scale_R)
    out_R: torch.Tensor = _TokenLogprobs.apply(hidden_RH, head.weight, how)  # type: ignore[no-untyped-call]
    return out_R


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RH: torch.Tensor, weight_VH: torch.Tensor, how: Any) -> torch.Tensor:
        ops, packed, tokens_R, scale_R = how
        parts = [
            _kernels().pick(
                ops.linear(hidden_RH[cut], packed, None, torch.float32), scale_R[cut], tokens_R[cut]
            )
            for cut in _cuts(hidden_RH, weight_VH)
        ]
        out_R, row_R4 = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_RH, weight_VH, tokens_R, scale_R, row_R4)
        ctx.ops = ops
        return out_R

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_RH, weight_VH, tokens_R, scale_R, row_R4 = ctx.saved_tensors
        grad_R = grads[0].contiguous()
        need_hidden, need_weight, _ = ctx.needs_input_grad
        dhidden_RH = torch.empty_like(hidden_RH) if need_hidden else None
        dweight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        for cut in _cuts(hidden_RH, weight_VH):
            logits_rV = ctx.ops.linear(hidden_RH[cut], ctx.ops.pack(weight_VH), None, torch.float32)
            own = (scale_R[cut], row_R4[cut], tokens_R[cut], grad_R[cut])
            dlogits_rV = _kernels().gradient(logits_rV, *own, weight_VH.dtype)
            if dhidden_RH is not None:
                torch.mm(dlogits_rV, weight_VH, out=dhidden_RH[cut])
            if dweight_VH is not None:
                # Added up in fp32: in the weight's own dtype every cut would round what is there already.
                torch.addmm(dweight_VH, dlogits_rV.T, hidden_RH[cut], out_dtype=torch.float32, out=dweight_VH)
        return dhidden_RH, None if dweight_VH is None else dweight_VH.to(weight_VH.dtype), None


def _cuts(hidden_RH: torch.Tensor, weight_VH: torch.Tensor) -> list[slice]:
    # A multiple of what cuBLAS is asked with, so that no cut but the last is padded.
    most = max(64, LOGITS_AT_ONCE // len(weight_VH) // 128 * 128)
    return [slice(begin, begin + most) for begin in range(0, len(hidden_RH), most)]


def _kernels() -> Any:
    return import_module("zerodrift.exact.ops.triton.token_logprobs")
