"""The CPU's ops behind the common interface, each with the plain twin that shows what exactness costs and prevents."""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import pad, scaled_dot_product_attention

from zerodrift.core.errors import InvalidValue
from zerodrift.exact.ops.cpu import attention, elementwise
from zerodrift.exact.ops.cpu.attention import Hidden, Keys
from zerodrift.exact.ops.cpu.blocks import BLOCK
from zerodrift.exact.ops.cpu.linear import linear, pack
from zerodrift.exact.ops.cpu.proof import RowProofs, linear_rows, prove_attention
from zerodrift.exact.ops.cpu.step import Gather, Group, Pages, Step
from zerodrift.exact.ops.interface import HeadShape, Parts, Query, Segments
from zerodrift.exact.probe import COUNTS
from zerodrift.models.first_calls import settle_first_calls

PLAIN = frozenset({"linear", "attention", "activation", "router", "experts"})
"""Ops that can be swapped for torch's own, to see a theorem fail."""


class CpuOps:
    """fp32 on any x86 or ARM CPU whose libraries pass the probe."""

    device = "cpu"
    dtypes = (torch.float32,)
    reads_unwritten = True
    rms_norm = None
    rms_norm_backward = None
    attend_backward = None
    experts = None
    fuses = False

    def __init__(self, plain: frozenset[str] = frozenset()) -> None:
        """`plain` names the ops to leave as torch has them."""
        if unknown := plain - PLAIN:
            raise InvalidValue(f"no op is called {sorted(unknown)}; plain twins exist for {sorted(PLAIN)}")
        self.plain = plain
        self.copies = "linear" not in plain
        self._rows = RowProofs({})
        self._elsewhere: frozenset[int] = frozenset()
        self._linear_rows: dict[tuple[object, ...], int] = {}

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prove(self, parts: Parts) -> None:
        """The shapes that every model has, so that a machine which cannot hold them is refused before the first token.

        All others are asked about when they occur.
        """
        settle_first_calls()
        if "attention" not in self.plain:
            prove_attention(parts.head_dim)
        for packed, bias_N in () if "linear" in self.plain else parts.linears:
            for count in COUNTS[:3]:
                linear_rows(packed, bias_N, count)
        self._rows = RowProofs({name: op for name, op in parts.row_ops.items() if name not in self.plain})
        self._linear_rows = {}
        self._elsewhere = self._rows.columns.difference(*(packed.shape for packed, _ in parts.linears))
        for columns in self._rows.columns:
            # A row of a vocabulary takes milliseconds: fewer of them.
            for count in COUNTS[:3] if columns > 2**14 else COUNTS:
                self._rows.require(columns, count)

    def pack(self, weight_NK: torch.Tensor) -> torch.Tensor:
        return weight_NK.detach() if "linear" in self.plain else pack(weight_NK)

    def linear(
        self,
        x_TK: torch.Tensor,
        packed: torch.Tensor,
        bias_N: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert dtype in (None, x_TK.dtype), "everything is fp32 here"
        if "linear" in self.plain:
            return plain_linear(x_TK, packed, bias_N)
        # One look-up where all is known: three of them took a tenth of a product of one row.
        key = (packed.shape, bias_N is None, len(x_TK), torch.get_num_threads())
        if key not in self._linear_rows:
            # What works on rows made those that come in, or takes those that go out: activations, norms, softmax.
            for columns in packed.shape:
                self._rows.require(columns, len(x_TK))
            self._linear_rows[key] = linear_rows(packed, bias_N, len(x_TK))
        return linear(x_TK, packed, bias_N, self._linear_rows[key])

    def activation(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return elementwise.ACTIVATIONS.get(name)

    def attend(
        self, q_THD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], segments: Segments, shape: HeadShape
    ) -> torch.Tensor:
        self._prove_rows(q_THD, kv[0].shape[1])
        out_THD = torch.zeros_like(q_THD)
        for begin, end in zip(segments.starts, segments.ends, strict=True):
            keys = _whole(kv[0][begin:end], kv[1][begin:end])
            out_THD[begin:end] = self._sequence(q_THD[begin:end], 0, keys, shape)
        return out_THD

    def plan(
        self, queries: list[Query], block_size: int, num_kv_heads: int, windows: Collection[int | None]
    ) -> Step:
        return Step(queries, Pages(block_size, num_kv_heads), windows)

    def attend_paged(
        self, q_THD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], step: Step, shape: HeadShape
    ) -> torch.Tensor:
        self._prove_rows(q_THD, kv[0].shape[1])
        out_THD = torch.empty_like(q_THD)
        singles = step.singles(shape.window)
        if singles.groups:
            q_SHD = q_THD[singles.tokens_S]
            out_THD.index_copy_(0, singles.tokens_S, self._singles(q_SHD, kv, step, shape))
        for query in step.chunks:
            keys = _gathered(kv, step, step.gather(query, shape.window), 1)
            q_nHD = q_THD[query.begin : query.end]
            out_THD[query.begin : query.end] = self._sequence(q_nHD, query.first, keys, shape)
        return out_THD

    def _prove_rows(self, q_THD: torch.Tensor, num_kv_heads: int) -> None:
        """What works on rows that no linear takes or gives: norms of each head, rotary tables."""
        tokens, heads, size = q_THD.shape
        # Also where a linear gives rows of this width, as that of a single kv head does: heads have more rows than tokens.
        for count in (tokens, tokens * heads, tokens * num_kv_heads):
            self._rows.require(size, count)
        for columns in self._elsewhere:
            self._rows.require(columns, tokens)

    def _singles(
        self, q_SHD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], step: Step, shape: HeadShape
    ) -> torch.Tensor:
        count, heads, size = q_SHD.shape
        num_kv = kv[0].shape[1]
        group_size = heads // num_kv
        out_ZGD = q_SHD.new_empty(count * num_kv, group_size, size)
        q_ZMD = (q_SHD * shape.scale).view(-1, group_size, size)
        for group in step.singles(shape.window).groups:
            keys = _gathered(kv, step, group.gather, group.end - group.begin)
            pairs = slice(group.begin * num_kv, group.end * num_kv)
            if "attention" in self.plain:
                _sdpa_single(q_ZMD[pairs], group, keys, out_ZGD[pairs])
            else:
                view = (group.end - group.begin, num_kv, group_size, group.gather.length)
                hidden = Hidden(group.hidden.begin, group.hidden.hidden_nl[:, None, None])
                attention.attend_rows(q_ZMD[pairs], keys, hidden, view, out_ZGD[pairs])
        return out_ZGD.view(count, heads, size)

    def _sequence(self, q_nHD: torch.Tensor, first: int, keys: Keys, shape: HeadShape) -> torch.Tensor:
        if "attention" in self.plain:
            return _sdpa(q_nHD, first, keys, shape)
        return attention.attend_sequence(q_nHD, first, keys, shape)

    def facts(self) -> Mapping[str, str]:
        return {
            "linear": "plain" if "linear" in self.plain else "onednn-prepacked",
            "attention": "sdpa" if "attention" in self.plain else f"blocks-{BLOCK}-global-max",
            "activation": "plain" if "activation" in self.plain else "primitives",
            "isa": torch.backends.cpu.get_cpu_capability(),
            # The libraries under the ops: an upgrade of either may change an order of summation.
            "blas": ", ".join(
                re.findall(r"(?:Math Kernel Library Version|MKL-DNN v)\s*([\d.]+)", torch.__config__.show())
            ),
        }


def _whole(k_TCD: torch.Tensor, v_TCD: torch.Tensor) -> Keys:
    """Keys of one sequence from position 0, padded with zeros to whole blocks."""
    count, heads, size = k_TCD.shape
    shape = (heads, -(-count // BLOCK) * BLOCK, size)
    k_CLD, v_CLD = k_TCD.new_zeros(shape), v_TCD.new_zeros(shape)
    k_CLD[:, :count] = k_TCD.transpose(0, 1)
    v_CLD[:, :count] = v_TCD.transpose(0, 1)
    return Keys(k_CLD, v_CLD, 0)


def _gathered(kv: tuple[torch.Tensor, torch.Tensor], step: Step, gather: Gather, sequences: int) -> Keys:
    _, heads, page, size = kv[0].shape
    inside = slice(gather.offset, gather.offset + gather.length)
    parts = []
    for which, pages in enumerate(kv):
        rows = pages.view(-1, page * size)
        room = step.room(which, len(gather.rows), rows)
        torch.index_select(rows, 0, gather.rows, out=room)
        parts.append(room.view(sequences * heads, -1, size)[:, inside])
    return Keys(parts[0], parts[1], gather.first)


def _sdpa(q_nHD: torch.Tensor, first: int, keys: Keys, shape: HeadShape) -> torch.Tensor:
    last = first + len(q_nHD) - keys.first
    positions = torch.arange(first, first + len(q_nHD))
    begin, hidden_nl = attention.hidden_keys(positions, keys.first, last, shape.window)
    return scaled_dot_product_attention(
        q_nHD.transpose(0, 1)[None],
        keys.k_ZLD[None, :, :last],
        keys.v_ZLD[None, :, :last],
        attn_mask=pad(~hidden_nl, (begin, 0), value=True),
        scale=shape.scale,
        enable_gqa=True,
    )[0].transpose(0, 1)


def _sdpa_single(q_ZMD: torch.Tensor, group: Group, keys: Keys, out_ZGD: torch.Tensor) -> None:
    count, size = group.end - group.begin, out_ZGD.shape[-1]
    k_SCLD, v_SCLD = (part.reshape(count, -1, *part.shape[1:]) for part in (keys.k_ZLD, keys.v_ZLD))
    seen_SL = pad(~group.hidden.hidden_nl, (group.hidden.begin, 0), value=True)
    out_ZGD.copy_(
        scaled_dot_product_attention(
            q_ZMD.reshape(count, -1, 1, size),
            k_SCLD,
            v_SCLD,
            attn_mask=seen_SL[:, None, None],
            scale=1.0,
            enable_gqa=True,
        ).view(out_ZGD.shape)
    )
