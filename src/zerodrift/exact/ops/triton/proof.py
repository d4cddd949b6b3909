"""Is attention the same bits alone, in a crowd, and one query at a time? Has cuBLAS the bits of K in order?

Asked of this GPU before either is used.
"""

from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from zerodrift.core.errors import Unproven
from zerodrift.exact.ops.interface import HeadShape, Query, Segments
from zerodrift.exact.ops.triton import cublas, fused, gemm, vocabulary
from zerodrift.exact.ops.triton.attention import BLOCK
from zerodrift.exact.probe import hard, same_bits

LENGTHS = (700, 200, 65, 64, 1)
"""Around one block of keys, and beyond one split of 512."""
KV_HEADS = 2
HARD_ROWS = 520
"""Different rows that products are compared on; more are these again, at other places."""


@torch.no_grad()
def cublas_agrees(weight_NK: torch.Tensor) -> bool:
    """Whether every row count that cuBLAS may be called with gives the bits of K in order, in fp32 and rounded."""
    counts = cublas.row_counts(len(weight_NK))
    few_TK = hard(HARD_ROWS, weight_NK.shape[1]).to(weight_NK.device, weight_NK.dtype)
    x_TK = few_TK.repeat(-(-counts[-1] // HARD_ROWS), 1)[: counts[-1]]
    for dtype in (torch.float32, weight_NK.dtype):
        in_order_TN = gemm.linear(x_TK, weight_NK, None, dtype)
        if not all(
            same_bits(cublas.linear(x_TK[:count], weight_NK, None, dtype), in_order_TN[:count])
            for count in counts
        ):
            return False
    return True


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """torch's own."""
    return gelu(x, approximate="tanh")


@cache
def silu_agrees() -> bool:
    """Whether the fused gate has torch's bits for every bf16 number there is."""
    return _gate_agrees(fused.silu_times, silu)


@cache
def gelu_tanh_agrees() -> bool:
    """The same for gelu by tanh."""
    return _gate_agrees(fused.gelu_tanh_times, gelu_tanh)


@torch.no_grad()
def _gate_agrees(
    at_once: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    gate_TI = every[every.isfinite()].view(-1, 64)
    up_TI = hard(*gate_TI.shape).to("cuda", torch.bfloat16)
    return same_bits(at_once(gate_TI, up_TI), activation(gate_TI) * up_TI)


@torch.no_grad()
def prove_draws(vocab_size: int) -> None:
    """A draw reports what the trainer's log-softmax gives for logits that torch divided by a temperature; or `Unproven`."""
    logits_RV = hard(3, vocab_size).clamp_(-40, 40).to("cuda")
    temperatures, tokens = [0.7, 1.0, 1.3], [0, vocab_size // 2, vocab_size - 1]
    few = vocabulary.Draws([0, 1, 2], [1, 2, 3], [0] * 3, [0] * 3, list(tokens), [False] * 3)
    drawn = vocabulary.draw(logits_RV, temperatures, few).logprobs_D
    for row, temperature in enumerate(temperatures):
        scored = vocabulary.log_softmax(logits_RV[row : row + 1] / temperature)[0, tokens[row]].item()
        if scored != drawn[row]:
            raise Unproven(
                f"a token drawn at temperature {temperature} has logprob {drawn[row]!r}, and {scored!r} when it is scored, "
                "on this GPU; exact mode cannot run here: use another release of torch or triton"
            )


def prove_attention(ops: Any, size: int, group: int, window: int | None) -> None:
    """Heads of `size`, `group` of them to a kv head, or `Unproven`."""
    generator = torch.Generator().manual_seed(size)
    # A window shows only in a sequence that is longer.
    lengths = LENGTHS if window is None else (window + BLOCK + 1, *LENGTHS)
    q_THD, k_TCD, v_TCD = (
        torch.randn(sum(lengths), heads, size, generator=generator).to("cuda", ops.dtypes[0])
        for heads in (group * KV_HEADS, KV_HEADS, KV_HEADS)
    )
    shape, bounds = HeadShape(size**-0.5, window), (0, *accumulate(lengths))
    crowd_THD = ops.attend(q_THD, (k_TCD, v_TCD), Segments(bounds[:-1], bounds[1:]), shape)
    for begin, end in pairwise(bounds):
        part = slice(begin, end)
        kv = (k_TCD[part], v_TCD[part])
        found = {
            "alone": ops.attend(q_THD[part], kv, Segments((0,), (end - begin,)), shape),
            "one query at a time": _decoded(ops, q_THD[end - 1 : end], kv, shape),
            "in a captured step": _decoded(ops, q_THD[end - 1 : end], kv, shape, seated=True),
        }
        for how, out_THD in found.items():
            if not same_bits(out_THD, crowd_THD[end - len(out_THD) : end]):
                raise Unproven(
                    f"attention over heads of {size}: a sequence of {end - begin} tokens has other bits {how} than among "
                    "others on this GPU; exact mode cannot run here: use another one, or another release of triton"
                )


def _decoded(
    ops: Any,
    q_1HD: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    shape: HeadShape,
    *,
    seated: bool = False,
) -> torch.Tensor:
    """The last token as a decode step computes it, from pages; `seated` as a captured one does."""
    length = len(kv[0])
    count = -(-length // BLOCK)
    pages = []
    for part_TCD in kv:
        room = part_TCD.new_zeros(count * BLOCK, *part_TCD.shape[1:])
        room[:length] = part_TCD
        pages.append(room.view(count, BLOCK, *part_TCD.shape[1:]).transpose(1, 2).contiguous())
    table_J = torch.arange(count, device=q_1HD.device)
    if seated:
        first, tokens, begin = (
            torch.tensor([each], device=q_1HD.device).int() for each in (length - 1, 1, 0)
        )
        step = ops.seated(first, tokens, begin, table_J.int())
    else:
        step = ops.plan([Query(0, 1, length - 1, table_J)], BLOCK, KV_HEADS, {shape.window})
    out_1HD: torch.Tensor = ops.attend_paged(q_1HD, tuple(pages), step, shape)
    return out_1HD
