"""The GPU's ops behind the common interface, each with its plain twin."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.nn.functional import linear as plain_linear

from zerodrift.core.errors import InvalidValue, UnsupportedModel
from zerodrift.exact import probe
from zerodrift.exact.ops.interface import HeadShape, Parts, Query, Segments
from zerodrift.exact.ops.triton import attention, cublas, fused, gemm, rows, vocabulary
from zerodrift.exact.ops.triton.attention import Layout
from zerodrift.exact.ops.triton.attention_backward import Saved, attend_backward
from zerodrift.exact.ops.triton.expert_ops import GroupedExperts
from zerodrift.exact.ops.triton.expert_proof import prove_experts
from zerodrift.exact.ops.triton.proof import (
    cublas_agrees,
    gelu_tanh,
    gelu_tanh_agrees,
    prove_attention,
    prove_draws,
    silu_agrees,
)
from zerodrift.exact.ops.triton.step import Step

PLAIN = frozenset({"linear", "attention", "norm", "router", "experts"})
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # A GPU has no vector tails: torch's own kernels compute every element alike, in fp32, and round once.
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
}


class CudaOps:
    """bf16 weights on one GPU."""

    device = "cuda"
    dtypes = (torch.bfloat16,)
    copies = False
    reads_unwritten = False

    def __init__(self, plain: frozenset[str] = frozenset()) -> None:
        """`plain` names the ops to leave as torch has them."""
        if unknown := plain - PLAIN:
            raise InvalidValue(f"no op is called {sorted(unknown)}; plain twins exist for {sorted(PLAIN)}")
        self.plain = plain
        self.rms_norm = None if "norm" in plain else rows.rms_norm
        self.rms_norm_backward = None if "norm" in plain else rows.rms_norm_backward
        self.fuses = not plain
        self.heads, self.add_norm = fused.heads, fused.add_norm
        self.attend_backward = None if "attention" in plain else self._attend_backward
        self.experts = GroupedExperts()
        self._last_whole: tuple[Segments, Step] | None = None
        self._proven: set[tuple[Any, ...]] = set()
        self._by_cublas: dict[tuple[int, ...], bool] = {}
        """By shape of a weight: whether cuBLAS has the bits of K in order, as it was found on this GPU."""

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext() if "linear" in self.plain else cublas.without_split_k()

    def prove(self, parts: Parts) -> None:
        size = parts.head_dim
        if size < 16 or size > 256 or size & (size - 1):
            raise UnsupportedModel(
                f"heads of {size} have no GPU kernel yet; sizes are powers of two from 16 to 256"
            )
        for window in () if "attention" in self.plain else parts.windows:
            if (key := ("attention", size, parts.group, window)) not in self._proven:
                prove_attention(self, size, parts.group, window)
                self._proven.add(key)
        prove_draws(parts.row_ops["log-softmax"].columns)
        for weight_NK, bias_N in () if "linear" in self.plain else parts.linears:
            self._prove_linear(weight_NK, bias_N)
        for weight_ENK, per_token in parts.grouped:
            if (key := ("experts", *weight_ENK.shape, per_token)) not in self._proven:
                prove_experts(self.experts, weight_ENK, per_token)
                self._proven.add(key)
        for name, op in parts.row_ops.items():
            if name.startswith("norm") and "norm" in self.plain:
                continue
            # A row of a vocabulary takes milliseconds: fewer of them.
            counts = (1, 2, 3, 8, 17) if op.columns > 2**14 else (*probe.COUNTS, 200)
            probe.require(
                lambda x, op=op: op.compute(x.to("cuda", op.dtype or self.dtypes[0])),  # type: ignore[misc]
                op.columns,
                name,
                counts,
            )

    def _prove_linear(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        """In fp32, where no rounding hides a difference, over all tiles. A shape is asked about once."""
        outputs, inputs = weight_NK.shape
        key = (outputs, inputs, bias_N is None)
        if key in self._proven:
            return
        probe.require(
            lambda x: gemm.linear(x.to(weight_NK.device, weight_NK.dtype), weight_NK, bias_N, torch.float32),
            inputs,
            f"linear {inputs} -> {outputs}",
            (*probe.COUNTS, 200),
        )
        if (outputs, inputs) not in self._by_cublas:
            self._by_cublas[outputs, inputs] = cublas_agrees(weight_NK)
        self._proven.add(key)

    def pack(self, weight_NK: torch.Tensor) -> torch.Tensor:
        return weight_NK.detach()

    def linear(
        self,
        x_TK: torch.Tensor,
        packed: torch.Tensor,
        bias_N: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        dtype = dtype or x_TK.dtype
        if "linear" in self.plain:
            return plain_linear(x_TK, packed, bias_N).to(dtype)
        self._prove_linear(packed, bias_N)
        if self._by_cublas[tuple(packed.shape)] and cublas.takes(x_TK, packed):
            return cublas.linear(x_TK, packed, bias_N, dtype)
        return gemm.linear(x_TK, packed, bias_N, dtype)

    def activation(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return _ACTIVATIONS.get(name)

    def gated(
        self, activation: Callable[[torch.Tensor], torch.Tensor], gate_TI: torch.Tensor, up_TI: torch.Tensor
    ) -> torch.Tensor:
        """activation(gate) · up, in one kernel where that has torch's bits on this GPU."""
        if activation is silu and silu_agrees():
            return fused.silu_times(gate_TI, up_TI)
        if activation is gelu_tanh and gelu_tanh_agrees():
            return fused.gelu_tanh_times(gate_TI, up_TI)
        return activation(gate_TI) * up_TI

    def attend(
        self,
        q_THD: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
        shape: HeadShape,
        *sums_TH: torch.Tensor,
    ) -> torch.Tensor:
        """By the kernel that reads pages, with keys where the model left them."""
        if "attention" in self.plain:
            return _sdpa(q_THD, kv, segments, shape)
        step = self._whole(segments, q_THD.device)
        covered = sum(step.counts) == len(q_THD)
        # Not like the queries: Gemma norms them by head, so that heads lie apart and tokens side by side.
        out_THD = q_THD.new_empty(q_THD.shape) if covered else q_THD.new_zeros(q_THD.shape)
        return self._attend(q_THD, (kv[0].contiguous(), kv[1].contiguous()), step, shape, out_THD, *sums_TH)

    def _attend_backward(
        self, saved: Sequence[torch.Tensor], dout_THD: torch.Tensor, segments: Segments, shape: HeadShape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_THD, k_TCD, *_ = parts = Saved(*(part.contiguous() for part in saved))
        step = self._whole(segments, dout_THD.device)
        covered = sum(step.counts) == len(q_THD)
        walks = step.walks(q_THD.shape[1] // k_TCD.shape[1], q_THD.shape[2])
        return attend_backward(parts, dout_THD, walks, shape.scale, shape.window, covered=covered)

    def _whole(self, segments: Segments, device: torch.device) -> Step:
        """What the layers of one forward and backward share, by the very segments that they were given."""
        known = self._last_whole
        if known is None or known[0] is not segments:
            self._last_whole = known = (segments, Step.of_whole(segments, device))
        return known[1]

    def plan(
        self, queries: list[Query], block_size: int, num_kv_heads: int, windows: Collection[int | None]
    ) -> Step:
        return Step.of(queries, queries[0].table_J.device)

    def seated(
        self, first_B: torch.Tensor, tokens_B: torch.Tensor, table_B: torch.Tensor, tables_J: torch.Tensor
    ) -> Step:
        """A step of sequences with one token each, or none; where, is read from these tensors when it runs."""
        start_B = torch.arange(len(first_B), dtype=torch.int32, device=first_B.device)
        counts = [1] * len(first_B)
        return Step(counts, Layout(start_B, tokens_B, first_B, table_B, tables_J))

    def attend_paged(
        self, q_THD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], step: Step, shape: HeadShape
    ) -> torch.Tensor:
        if "attention" in self.plain:
            return _sdpa_paged(q_THD, kv, step, shape)
        return self._attend(q_THD, kv, step, shape, q_THD.new_empty(q_THD.shape))

    def _attend(
        self,
        q_THD: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        step: Step,
        shape: HeadShape,
        out_THD: torch.Tensor,
        *sums_TH: torch.Tensor,
    ) -> torch.Tensor:
        q_THD = q_THD.contiguous()
        tiles = step.tiles(q_THD.shape[1] // kv[0].shape[1], q_THD.shape[2])
        attention.attend(q_THD, kv, step.layout, tiles, shape.scale, shape.window, out_THD, *sums_TH)
        return out_THD

    def facts(self) -> Mapping[str, str]:
        major, minor = torch.cuda.get_device_capability()
        return {
            "linear": "cublas" if "linear" in self.plain else "triton-k-in-order",
            "attention": "sdpa"
            if "attention" in self.plain
            else f"blocks-{attention.BLOCK}-splits-{attention.SPLIT}",
            "norm": "plain" if "norm" in self.plain else "triton-row",
            "gate": "one-kernel" if silu_agrees() and gelu_tanh_agrees() else "torch",
            "experts": "plain" if self.plain & {"router", "experts"} else "grouped-k-in-order",
            "vocabulary": f"chunks-{vocabulary.CHUNK}",
            "isa": f"sm_{major}{minor}",
            "triton": triton.__version__,
            "cuda": str(torch.version.cuda),
        }


def _sdpa(
    q_THD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], segments: Segments, shape: HeadShape
) -> torch.Tensor:
    """torch's own, sequence by sequence; where there is no window, by the kernel for causal ones."""
    out_THD = torch.zeros_like(q_THD)
    for begin, end in zip(*segments, strict=True):
        q, k, v = (part[begin:end].transpose(0, 1)[None] for part in (q_THD, *kv))
        positions = torch.arange(end - begin, device=q.device)
        seen = None if shape.window is None else _seen(positions, shape.window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=shape.scale, enable_gqa=True
        )
        out_THD[begin:end] = out[0].transpose(0, 1)
    return out_THD


def _sdpa_paged(
    q_THD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], step: Step, shape: HeadShape
) -> torch.Tensor:
    """The same against gathered pages, queries at the end of the keys."""
    out_THD = torch.empty_like(q_THD)
    for query in step.queries:
        q = q_THD[query.begin : query.end].transpose(0, 1)[None]
        k, v = (part[query.table_J].transpose(0, 1).flatten(1, 2)[None, :, : query.last + 1] for part in kv)
        positions = torch.arange(query.first, query.last + 1, device=q.device)
        seen = _seen(positions, shape.window)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=shape.scale, enable_gqa=True)
        out_THD[query.begin : query.end] = out[0].transpose(0, 1)
    return out_THD


def _seen(positions_n: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys, from position 0 to the last, each query sees."""
    keys_L = torch.arange(int(positions_n[-1]) + 1, device=positions_n.device)
    seen_nL = keys_L <= positions_n[:, None]
    return seen_nL if window is None else seen_nL & (keys_L > positions_n[:, None] - window)
