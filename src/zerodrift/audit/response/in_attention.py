"""Levers inside attention: its scores, one more entry in its softmax, where queries stand, what keys and values are kept in.

Where derivatives are wanted, levers are at 0, and what a lever adds to the output is a product of itself and of numbers that
need no graph: attention over long windows keeps no scores for the backward. Shapes: B rows, H heads, L positions, D size
of a head, F frequencies.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from zerodrift.audit.response.levers import Effect
from zerodrift.models.copies import sharing
from zerodrift.models.family.parts import ModelParts

ATTENTION = "zerodrift_response"
LEVERS = "_zerodrift_levers"
IN_ATTENTION = frozenset(
    {
        Effect.SCORES,
        Effect.KEYS_FP8,
        Effect.VALUES_FP8,
        Effect.SINK,
        Effect.SCORE_CAP,
        Effect.HEAD_POSITION,
    }
)
FP8_MAX = 448.0
"""Largest finite e4m3."""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers computes it, with the levers that stand in the module."""
    levers = module.__dict__.get(LEVERS, {})
    if Effect.SCORES in levers:
        query = query * (1 + levers[Effect.SCORES])[:, :, None, None]
    if Effect.HEAD_POSITION in levers:
        query = _turned(query, levers[Effect.HEAD_POSITION])
    key = _stored(key, levers.get(Effect.KEYS_FP8))
    value = _stored(value, levers.get(Effect.VALUES_FP8))
    given, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    if Effect.SINK not in levers and Effect.SCORE_CAP not in levers:
        return given, None
    scores = _Scores(module, query, key, value, mask, options.get("scaling"))
    if Effect.SCORE_CAP in levers:
        given = scores.capped(given, levers[Effect.SCORE_CAP][:, :, None, None])
    if Effect.SINK in levers:
        given = _with_sink(given, levers[Effect.SINK][:, None, :, None], scores.against_one(given.dtype))
    return given, None


def _with_sink(given: torch.Tensor, t_B1H1: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Where a derivative is wanted, it is what an entry of weight 1 does: the first tokens of a text lose half by it, and what
    less does to them says nothing of that."""
    if t_B1H1.requires_grad:
        return given - t_B1H1 * (given.detach() * share / (1 + share))
    return given / (1 + t_B1H1 * share)


def with_capped_scores(model: Any, layers: Sequence[int], cap: float) -> Any:
    """A copy around the same weights whose attention scores are squeezed into ± `cap` in some layers."""
    register()
    changed = sharing(model)
    changed.set_attn_implementation(ATTENTION)
    attentions = ModelParts(changed).attentions()
    for number in layers:
        t_11 = torch.full((1, 1), cap**-2.0, dtype=model.dtype, device=model.device)
        attentions[number].__dict__[LEVERS] = {Effect.SCORE_CAP: t_11}
    return changed


def register() -> None:
    """Under its name, with the masks that it takes."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class _Scores:
    """Those of one attention, a row of the batch at a time, and without a graph."""

    def __init__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> None:
        groups = getattr(module, "num_key_value_groups", 1)
        self._query = query.detach()
        self._key = repeat_kv(key.detach(), groups)
        self._value = repeat_kv(value.detach(), groups)
        self._mask = mask
        self._scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def against_one(self, dtype: torch.dtype) -> torch.Tensor:
        """[B, L, H, 1]: what an entry of score 0 weighs, in units of all that a query sees."""
        rows = [self._masked(row, self._of(row)).logsumexp(dim=-1) for row in range(len(self._query))]
        return (-torch.stack(rows)).exp().transpose(1, 2)[..., None].to(dtype)

    def capped(self, given: torch.Tensor, t_B111: torch.Tensor) -> torch.Tensor:
        """c · tanh(x / c) for scores x, where t is 1/c². Where a derivative is wanted it is that of x − t·x³/3."""
        if t_B111.requires_grad:
            slopes = [self._cubed(row, given[row].detach()) for row in range(len(self._query))]
            return given + t_B111 * torch.stack(slopes)
        rows = []
        for row, t_111 in enumerate(t_B111.expand(len(given), -1, -1, -1)):
            scores, cap = self._of(row), t_111.clamp(min=1e-12).rsqrt()
            weights = self._masked(row, cap * torch.tanh(scores / cap)).softmax(dim=-1)
            # To the bit as it was where nothing is squeezed.
            capped = (weights @ self._value[row]).transpose(0, 1).to(given.dtype)
            rows.append(capped if float(t_111) > 0 else given[row])
        return torch.stack(rows)

    def _of(self, row: int) -> torch.Tensor:
        """[H, L, L], of what is seen and what is not."""
        scores: torch.Tensor = self._query[row] @ self._key[row].transpose(-1, -2) * self._scaling
        return scores

    def _masked(self, row: int, scores: torch.Tensor) -> torch.Tensor:
        if self._mask is None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            return scores.masked_fill(~seen, -torch.inf)
        mask = self._mask[row, :, :, : scores.shape[-1]]
        if mask.dtype is not torch.bool:
            return scores + mask
        # What is padding sees nothing: it is given something to see, and nobody reads it.
        return scores.masked_fill(~mask & mask.any(dim=-1, keepdim=True), -torch.inf)

    def _cubed(self, row: int, given: torch.Tensor) -> torch.Tensor:
        scores = self._of(row)
        weights = self._masked(row, scores).softmax(dim=-1) * scores**3 / 3
        moved = (weights @ self._value[row]).transpose(0, 1)
        slopes: torch.Tensor = weights.sum(dim=-1).transpose(0, 1)[..., None] * given - moved
        return slopes


def _turned(query: torch.Tensor, angles_BHF: torch.Tensor) -> torch.Tensor:
    """Queries as they would stand further on; only so many channels turn as there are frequencies."""
    half = angles_BHF.shape[-1]
    turn, rise = angles_BHF.cos()[:, :, None], angles_BHF.sin()[:, :, None]
    one, other, still = query[..., :half], query[..., half : 2 * half], query[..., 2 * half :]
    turned = (one * turn - other * rise, other * turn + one * rise, still)
    return torch.cat(turned, dim=-1).to(query.dtype)


def _stored(given: torch.Tensor, t_B1: torch.Tensor | None) -> torch.Tensor:
    if t_B1 is None:
        return given
    plain = given.detach()
    rounded = plain.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(given.dtype)
    return given + t_B1[:, :, None, None] * (rounded - plain)
