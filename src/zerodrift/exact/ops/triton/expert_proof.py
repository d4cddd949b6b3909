"""Has each pair of a token and an expert the bits of K in order, whoever goes the same way? Asked before experts are used.

What a pair must give is known from the plain product of its row with the weight of its expert. Tokens are routed unevenly:
of few pairs some experts get none, and of many the first gets most. All tiles have their turn.
Shapes: T tokens, K experts of a token, P pairs of both, E experts, N outputs, D inputs.
"""

import torch

from zerodrift.core.errors import Unproven
from zerodrift.exact.ops.interface import ExpertOps, ExpertRows
from zerodrift.exact.ops.triton import gemm
from zerodrift.exact.probe import SAMPLE, hard, same_bits

MEAN_PAIRS = (1, 40, 80)
"""Of an expert, in the mean: 16, 64 and 128 rows to a tile."""


@torch.no_grad()
def prove_experts(ops: ExpertOps, weight_END: torch.Tensor, per_token: int) -> None:
    """Products with weights of this shape, and their sums, where a token has so many experts; or `Unproven`."""
    experts, columns, depth = weight_END.shape
    few_SD = hard(SAMPLE, depth).to(weight_END.device, weight_END.dtype)
    own_ESN = torch.stack([gemm.linear(few_SD, weight, None, torch.float32) for weight in weight_END])
    for mean in MEAN_PAIRS:
        tokens = -(-experts * mean // per_token)
        chosen_TK = uneven(tokens, experts, per_token).to(weight_END.device)
        sample_T = torch.arange(tokens, device=weight_END.device) % SAMPLE
        wanted_PN = own_ESN[chosen_TK.flatten(), sample_T.repeat_interleave(per_token)]
        for rows in ExpertRows:
            if not same_bits(_by_pair(ops, few_SD[sample_T], weight_END, chosen_TK, rows), wanted_PN):
                raise Unproven(
                    f"experts {depth} -> {columns}: rows of {tokens} tokens have other bits among {experts} experts than by "
                    "a product of their own on this GPU; exact mode cannot run here: use another one, or another release of "
                    "triton"
                )
    _prove_sums(ops, own_ESN.flatten(0, 1).to(weight_END.dtype), per_token)


def uneven(tokens: int, experts: int, per_token: int) -> torch.Tensor:
    """[T, K] experts, drawn from a seed, those of a token all different: the lower the number, the likelier."""
    generator = torch.Generator().manual_seed(tokens)
    weights_TE = (2.0 ** -(8 * torch.arange(experts) / experts)).expand(tokens, -1)
    return torch.multinomial(weights_TE, per_token, generator=generator)


def _by_pair(
    ops: ExpertOps, x_TD: torch.Tensor, weight_END: torch.Tensor, chosen_TK: torch.Tensor, rows: ExpertRows
) -> torch.Tensor:
    """Products in fp32, where no rounding hides a difference, in order of pairs."""
    groups = ops.groups(chosen_TK, len(weight_END))
    order_P = groups.order_P.long()
    if rows is ExpertRows.TOKENS_TO_GROUPS:
        by_group_PN = ops.product(x_TD, weight_END, groups, rows, torch.float32)
        return torch.empty_like(by_group_PN).index_copy_(0, order_P, by_group_PN)
    return ops.product(x_TD[order_P // groups.per_token], weight_END, groups, rows, torch.float32)


def _prove_sums(ops: ExpertOps, made_PN: torch.Tensor, per_token: int) -> None:
    tokens = len(made_PN) // per_token
    made_PN = made_PN[: tokens * per_token]
    weights_TK = hard(tokens, per_token).to(made_PN.device, made_PN.dtype)
    together_TN = ops.combine(made_PN, weights_TK)
    for token in range(0, tokens, max(1, tokens // SAMPLE)):
        pairs = slice(token * per_token, (token + 1) * per_token)
        alone_1N = ops.combine(made_PN[pairs], weights_TK[token : token + 1])
        if not same_bits(alone_1N, together_TN[token : token + 1]):
            raise Unproven(
                "sums over a token's experts have other bits alone than among others on this GPU; exact mode cannot run here"
            )
