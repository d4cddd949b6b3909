"""Experts on a GPU behind the common interface.

Shapes: T tokens, K experts of a token, P pairs of both, E experts, N outputs, D inputs.
"""

import torch

from zerodrift.exact.ops.interface import ExpertRows
from zerodrift.exact.ops.triton import grouped, routing
from zerodrift.exact.ops.triton.grouped import Groups, Weight


class GroupedExperts:
    """Products of all experts at once, K in order for each pair of a token and an expert."""

    def route(
        self, logits_TE: torch.Tensor, count: int, *, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return routing.route(logits_TE, count, normalise=normalise)

    def groups(self, experts_TK: torch.Tensor, num_experts: int) -> Groups:
        return grouped.groups_of(experts_TK, num_experts)

    def product(
        self,
        x: torch.Tensor,
        weight_END: torch.Tensor,
        groups: Groups,
        rows: ExpertRows,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        weight_END = weight_END.detach().contiguous()
        _, columns, depth = weight_END.shape
        walk = Weight(columns * depth, depth, 1)
        places = (groups.per_token, False) if rows is ExpertRows.TOKENS_TO_GROUPS else (0, True)
        return grouped.product(x, (weight_END, walk), columns, groups, places, dtype or x.dtype)

    def grad_of_rows(
        self, grad_PN: torch.Tensor, weight_END: torch.Tensor, groups: Groups, rows: ExpertRows
    ) -> torch.Tensor:
        """What comes from several experts of one token is added up in fp32."""
        weight_END = weight_END.detach().contiguous()
        _, columns, depth = weight_END.shape
        across = (weight_END, Weight(columns * depth, 1, depth))
        if rows is ExpertRows.GROUPS_TO_PAIRS:
            return grouped.product(grad_PN, across, depth, groups, (1, False), grad_PN.dtype)
        by_pair_PD = grouped.product(grad_PN, across, depth, groups, (0, True), torch.float32)
        return by_pair_PD.view(-1, groups.per_token, depth).sum(1).to(grad_PN.dtype)

    def grad_of_weight(
        self, grad_PN: torch.Tensor, x: torch.Tensor, groups: Groups, rows: ExpertRows
    ) -> torch.Tensor:
        places = (False, groups.per_token) if rows is ExpertRows.TOKENS_TO_GROUPS else (True, 0)
        return grouped.weight_grad(grad_PN, x, groups, places)

    def combine(self, made_PH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return routing.combine(made_PH, weights_TK)
