"""Which experts a token goes to, and what comes back from them: one program per token, in one order.

Equal probabilities go to the expert with the lower number. Results of a token's experts are added in fp32, the likeliest
first, and rounded once; a product of two bf16 numbers is exact in fp32, so that it does not matter what is contracted.
Shapes: T tokens, E experts, K experts of a token, P pairs of token and expert, H hidden size.
"""

import torch
import triton
import triton.language as tl

from zerodrift.exact.ops.triton.rows import warps_for


@triton.jit
def _route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    PLACES: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + token * EXPERTS + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    share = tl.exp(x - tl.max(x, 0))
    whole = tl.sum(share, 0)
    left = tl.where(e < EXPERTS, share / whole, -1.0)
    place = tl.arange(0, PLACES)
    weights, experts = tl.zeros((PLACES,), tl.float32), tl.zeros((PLACES,), tl.int32)
    chosen = 0.0
    for number in tl.static_range(COUNT):
        most = tl.max(left, 0)
        # A row that is not finite has no most: its experts are nobody's business, but they must exist.
        expert = tl.minimum(tl.min(tl.where(left == most, e, EXPERTS - 1), 0), EXPERTS - 1)
        weights = tl.where(place == number, most, weights)
        experts = tl.where(place == number, expert, experts)
        chosen += most
        left = tl.where(e == expert, -1.0, left)
    if NORMALISE:
        weights = weights / chosen
    # The likeliest share is 1 before it is divided, unless a logit is not finite.
    weights = tl.where(whole > 0, weights, float("nan"))
    at = token * COUNT + place
    tl.store(weights_ptr + at, weights.to(weights_ptr.dtype.element_ty), mask=place < COUNT)
    tl.store(experts_ptr + at, experts.to(tl.int64), mask=place < COUNT)


def route(logits_TE: torch.Tensor, count: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers of the `count` likeliest experts, likeliest first."""
    logits_TE = logits_TE.contiguous()
    tokens, experts = logits_TE.shape
    weights_TK = logits_TE.new_empty(tokens, count)
    experts_TK = torch.empty(tokens, count, dtype=torch.int64, device=logits_TE.device)
    _route_kernel[(tokens,)](
        logits_TE,
        weights_TK,
        experts_TK,
        experts,
        triton.next_power_of_2(experts),
        count,
        triton.next_power_of_2(count),
        normalise,
        num_warps=warps_for(experts),
        enable_fp_fusion=False,
    )
    return weights_TK, experts_TK


@triton.jit
def _combine_kernel(
    made_ptr, weights_ptr, out_ptr, SIZE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(COUNT):
        pair = token * COUNT + number
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        total += weight * tl.load(made_ptr + pair * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(made_PH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Rows of each token's experts, times their weights, added in order of place."""
    made_PH, weights_TK = made_PH.contiguous(), weights_TK.contiguous()
    (tokens, count), size = weights_TK.shape, made_PH.shape[1]
    out_TH = made_PH.new_empty(tokens, size)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(tokens, triton.cdiv(size, block))](
        made_PH, weights_TK, out_TH, size, count, block, num_warps=4, enable_fp_fusion=False
    )
    return out_TH
