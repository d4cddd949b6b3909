"""The attention function that `transformers` calls in a prepared model, and how it learns what it looks at.

An engine step passes `exact_step` through the model's keyword arguments. Any other forward is one of whole sequences,
packed one after another or padded: where they lie is read from the position ids and the padding mask.
Shapes: B rows of the batch, T tokens, H query heads, C kv heads, D head size.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from zerodrift.core.errors import UnsupportedModel
from zerodrift.exact.ops.interface import HeadShape, Segments

NAME = "zerodrift_exact"


def register() -> None:
    """Make the function known to transformers under NAME. Nothing else changes."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _padding_mask)


def attention(  # noqa: PLR0913  transformers calls it so
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[B, H, T, D] in, [B, T, H, D] out."""
    if dropout:
        raise UnsupportedModel(
            f"attention dropout is {dropout}; exact mode has none: set attention_dropout=0"
        )
    if kwargs.get("softcap") is not None:
        raise UnsupportedModel(
            f"scores are to be capped at {kwargs['softcap']}; exact attention has no cap on scores"
        )
    ops = module.exact_ops
    batch, heads, tokens, size = query.shape
    q_THD, k_TCD, v_TCD = (
        part.transpose(1, 2).reshape(batch * part.shape[2], -1, size) for part in (query, key, value)
    )
    shape = HeadShape(scaling, sliding_window)
    step = kwargs.get("exact_step")
    if step is not None:
        out_THD = step.attend(ops, module.layer_idx, (q_THD, k_TCD, v_TCD), shape)
    else:
        if key.shape[2] != tokens:
            raise UnsupportedModel(
                f"{tokens} queries came with {key.shape[2]} keys; a prepared model has no KV cache of transformers: "
                "score whole sequences, and generate with zerodrift's engine"
            )
        if module.layer_idx == 0:
            ops.last_segments = None
        segments = _segments(ops, kwargs.get("position_ids"), attention_mask, (batch, tokens))
        # Autocast would round the products to 16 bits; nothing else in a prepared model is touched by it.
        with torch.autocast(query.device.type, enabled=False):
            out_THD = _Attention.apply(q_THD, k_TCD, v_TCD, (ops, segments, shape))  # type: ignore[no-untyped-call]
    return out_THD.view(batch, tokens, heads, size), None


class _Attention(torch.autograd.Function):
    """Exact forward; the backward is the device's own, else the plain softmax's, one tile of queries at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TCD: torch.Tensor,
        v_TCD: torch.Tensor,
        how: tuple[Any, Segments, HeadShape],
    ) -> torch.Tensor:
        ops, segments, shape = how
        sums: list[torch.Tensor] = []
        if ops.attend_backward is not None and any(ctx.needs_input_grad):
            sums = [q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)]
        out_THD: torch.Tensor = ops.attend(q_THD, (k_TCD, v_TCD), segments, shape, *sums)
        ctx.save_for_backward(q_THD, k_TCD, v_TCD, out_THD, *sums)
        ctx.how = how
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ops, segments, shape = ctx.how
        if ops.attend_backward is not None:
            return (*ops.attend_backward(ctx.saved_tensors, grads[0], segments, shape), None)
        q_THD, k_TCD, v_TCD, out_THD = ctx.saved_tensors
        # Sums over queries in at least fp32, whatever the model's dtype.
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(part, dtype=wide) for part in (q_THD, k_TCD, v_TCD))
        for begin, end in zip(segments.starts, segments.ends, strict=True):
            inside = slice(begin, end)
            _backward(
                (q_THD[inside], k_TCD[inside], v_TCD[inside], out_THD[inside], grads[0][inside]),
                (dq[inside], dk[inside], dv[inside]),
                shape,
            )
        return dq.to(q_THD.dtype), dk.to(q_THD.dtype), dv.to(q_THD.dtype), None


_BACKWARD_TILE = 256


def _backward(saved: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...], shape: HeadShape) -> None:
    """dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)), in the dtype of `grads`, added to them in place."""
    count, kv_heads, size = saved[1].shape
    q, out, dout = (
        part.to(grads[0].dtype).view(count, kv_heads, -1, size).permute(1, 2, 0, 3)
        for part in (saved[0], saved[3], saved[4])
    )
    k, v = (part.to(grads[0].dtype).transpose(0, 1)[:, None] for part in saved[1:3])
    dq, dk, dv = grads
    positions = torch.arange(count, device=q.device)
    for begin in range(0, count, _BACKWARD_TILE):
        rows = slice(begin, min(begin + _BACKWARD_TILE, count))
        low = 0 if shape.window is None else max(0, begin - shape.window + 1)
        keys = slice(low, rows.stop)
        hidden = positions[keys] > positions[rows, None]
        if shape.window is not None:
            hidden |= positions[keys] <= positions[rows, None] - shape.window
        scores = (q[:, :, rows] @ k[:, :, keys].mT) * shape.scale
        probs = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        delta = (dout[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
        dscores = probs * (dout[:, :, rows] @ v[:, :, keys].mT - delta) * shape.scale
        dq[rows] = (dscores @ k[:, :, keys]).permute(2, 0, 1, 3).reshape(-1, *dq.shape[1:])
        dk[keys] += (dscores.mT @ q[:, :, rows]).sum(1).transpose(0, 1)
        dv[keys] += (probs.mT @ dout[:, :, rows]).sum(1).transpose(0, 1)


def _padding_mask(*, attention_mask: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
    """The 2-d padding mask as it came: what is causal is known from positions."""
    return attention_mask


def _segments(
    ops: Any, position_ids: torch.Tensor | None, mask: torch.Tensor | None, shape: tuple[int, int]
) -> Segments:
    """Where whole sequences lie among the flattened tokens, remembered for the layers that follow.

    Each forward reads it anew: a trainer may write the next batch's positions into the same tensor.
    """
    known = getattr(ops, "last_segments", None)
    if known is not None and known[0] is position_ids and known[1] is mask and known[2] == shape:
        found: Segments = known[3]
        return found
    found = segments_of(position_ids, mask, shape)
    ops.last_segments = (position_ids, mask, shape, found)
    return found


def segments_of(
    position_ids: torch.Tensor | None, mask: torch.Tensor | None, shape: tuple[int, int]
) -> Segments:
    """A sequence starts where the position is 0, and goes on while positions count up and nothing is padding."""
    batch, tokens = shape
    if mask is not None and mask.dim() != 2:
        raise UnsupportedModel(
            f"the attention mask has {mask.dim()} dimensions; give a [batch, tokens] padding mask"
        )
    positions = torch.arange(tokens)[None] if position_ids is None else position_ids.cpu()
    positions = positions.expand(batch, tokens).flatten()
    real = torch.ones(batch * tokens, dtype=torch.bool) if mask is None else mask.bool().cpu().flatten()
    index = torch.arange(batch * tokens)
    row_start = index % tokens == 0
    begins = real & (positions == 0)
    follows = torch.zeros_like(real)
    follows[1:] = real[:-1] & (positions[1:] == positions[:-1] + 1)
    follows &= ~row_start
    if bool((real & ~begins & ~follows).any()):
        at = int((real & ~begins & ~follows).nonzero()[0])
        raise UnsupportedModel(
            f"token {at % tokens} of row {at // tokens} has position {int(positions[at])} without one before it; "
            "sequences start at position 0: pass position_ids where a row is packed or padded on the left"
        )
    starts = begins.nonzero().flatten().tolist()
    after = torch.ones(len(real) + 1, dtype=torch.bool)
    after[:-1] = ~real | begins
    breaks = after.nonzero().flatten()
    ends = [int(breaks[torch.searchsorted(breaks, start, right=True)]) for start in starts]
    return Segments(tuple(starts), tuple(ends))
