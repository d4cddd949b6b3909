"""Experts on devices that multiply by all of them at once, differentiable; nothing is read back from the device.

Tokens are sorted by expert, go through two products, come back, and are added up in the order of the router's choice:
what a token gets is a function of the token. The loop over experts, for other devices, is in `experts.py`.
Shapes: T tokens, E experts, K experts of a token, P pairs of token and expert, H hidden size, N outputs.
"""

from typing import Any

import torch

from zerodrift.core.errors import UnsupportedModel
from zerodrift.exact.ops.interface import ExpertOps, ExpertRows


class _Route(torch.autograd.Function):
    """Exact choice and weights; the backward is that of softmax, choice and normalisation, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: torch.Tensor, how: tuple[ExpertOps, int, bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ops, count, normalise = how
        weights_TK, experts_TK = ops.route(logits_TE, count, normalise=normalise)
        ctx.save_for_backward(logits_TE, experts_TK)
        ctx.mark_non_differentiable(experts_TK)
        ctx.normalise = normalise
        return weights_TK, experts_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_TE, experts_TK = ctx.saved_tensors
        probs_TE = torch.softmax(logits_TE.float(), dim=-1)
        grad_TK = grads[0].float()
        if ctx.normalise:
            chosen_TK = probs_TE.gather(1, experts_TK)
            total_T1 = chosen_TK.sum(-1, keepdim=True)
            along_T1 = (grad_TK * chosen_TK).sum(-1, keepdim=True) / total_T1
            grad_TK = (grad_TK - along_T1) / total_T1
        # No token goes twice to one expert: nothing is added up here.
        grad_TE = torch.zeros_like(probs_TE).scatter(1, experts_TK, grad_TK)
        grad_TE = probs_TE * (grad_TE - (grad_TE * probs_TE).sum(-1, keepdim=True))
        return grad_TE.to(logits_TE.dtype), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_ENH: torch.Tensor, how: tuple[ExpertOps, Any, ExpertRows]
    ) -> torch.Tensor:
        ops, groups, rows = how
        ctx.save_for_backward(x, weight_ENH)
        ctx.how = how
        return ops.product(x, weight_ENH, groups, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_ENH = ctx.saved_tensors
        ops, groups, rows = ctx.how
        grad_PN, (need_x, need_weight, _) = grads[0].to(x.dtype), ctx.needs_input_grad
        return (
            ops.grad_of_rows(grad_PN, weight_ENH, groups, rows) if need_x else None,
            # As large as all experts: not made for those that are frozen.
            ops.grad_of_weight(grad_PN, x, groups, rows) if need_weight else None,
            None,
        )


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made_PH: torch.Tensor, weights_TK: torch.Tensor, ops: ExpertOps) -> torch.Tensor:
        ctx.save_for_backward(made_PH, weights_TK)
        return ops.combine(made_PH, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made_PH, weights_TK = ctx.saved_tensors
        grad_TH = grads[0].to(made_PH.dtype)
        made_TKH = made_PH.view(*weights_TK.shape, -1)
        grad_TKH = grad_TH[:, None] * weights_TK[:, :, None]
        grad_TK = torch.bmm(made_TKH, grad_TH[:, :, None])[:, :, 0]
        return grad_TKH.view(made_PH.shape), grad_TK.to(weights_TK.dtype), None


def routed_at_once(
    ops: ExpertOps, logits_TE: torch.Tensor, count: int, *, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the `count` likeliest experts, likeliest first; differentiable."""
    if not torch.is_grad_enabled():
        return ops.route(logits_TE, count, normalise=normalise)
    found: tuple[torch.Tensor, torch.Tensor] = _Route.apply(logits_TE, (ops, count, normalise))  # type: ignore[no-untyped-call]
    return found


class ExactGroupedExperts:
    """What the class of experts is mixed with where the device multiplies by all of them at once."""

    num_experts: int
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    act_fn: Any
    exact_ops: Any

    def forward(
        self, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Each token's experts, weighted and added in the order in which they come."""
        weights = (self.gate_up_proj, self.down_proj)
        if {hidden_TH.dtype, *(weight.dtype for weight in weights)} - {*self.exact_ops.dtypes}:
            raise UnsupportedModel(
                f"{hidden_TH.dtype} activations meet experts of {self.gate_up_proj.dtype}; exact mode computes in "
                f"{self.exact_ops.dtypes}, and mixes none"
            )
        ops: ExpertOps = self.exact_ops.experts
        groups = ops.groups(experts_TK, self.num_experts)
        if not torch.is_grad_enabled():
            gate, up = ops.product(hidden_TH, weights[0], groups, ExpertRows.TOKENS_TO_GROUPS).chunk(
                2, dim=-1
            )
            inner = self.exact_ops.gated(self.act_fn.function, gate, up)
            return ops.combine(ops.product(inner, weights[1], groups, ExpertRows.GROUPS_TO_PAIRS), weights_TK)
        gate_up: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            hidden_TH, weights[0], (ops, groups, ExpertRows.TOKENS_TO_GROUPS)
        )
        gate, up = gate_up.chunk(2, dim=-1)
        inner = self.act_fn(gate) * up
        made_PH = _Product.apply(inner, weights[1], (ops, groups, ExpertRows.GROUPS_TO_PAIRS))  # type: ignore[no-untyped-call]
        out_TH: torch.Tensor = _Combine.apply(made_PH, weights_TK, ops)  # type: ignore[no-untyped-call]
        return out_TH
