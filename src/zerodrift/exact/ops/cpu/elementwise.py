"""Activations built only from primitives that give an element the same bits wherever it lies in a tensor.

torch's own silu, sigmoid, gelu and softplus take another formula for the elements left over by the vector width, and
threads move where that is: up to 60 % of such elements change. exp, tanh, erf and + − × ÷ do not.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


class _Silu(torch.autograd.Function):
    """x·σ(x). Its own backward, because autograd's through exp(-x) is 0·inf below -88."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        grad: torch.Tensor = grads[0] * sigmoid * (1 + x * (1 - sigmoid))
        return grad


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e⁻ˣ)."""
    if torch.is_grad_enabled() and x.requires_grad:
        out: torch.Tensor = _Silu.apply(x)  # type: ignore[no-untyped-call]
        return out
    return _silu(x)


def _silu(x: torch.Tensor) -> torch.Tensor:
    denominator = torch.neg(x).exp_().add_(1)
    return torch.div(x, denominator, out=denominator)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x Φ(x), by the error function."""
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The approximation by tanh."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Squeeze into (-cap, cap)."""
    return torch.tanh(x / cap) * cap


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}
