"""Faults of attention: keys that must not be seen are, or some that must be are not, or those of another head are.

Shapes: B rows, Q queries, K keys, H hidden.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zerodrift.core.errors import InvalidValue
from zerodrift.faults.damage import Damage, damaged
from zerodrift.faults.wrapper import Plant
from zerodrift.models.family.parts import ModelParts

Mask = Callable[[torch.Tensor], torch.Tensor]
"""[B, 1, Q, K], true where a query sees a key, to the same with a fault; the last query is that of the last key."""

NARROW = 48
"""Tokens of a window that no built-in model has."""


def _regrouped(regroup: Callable[[ModelParts, int, int], None]) -> Damage:
    def damage(model: Any) -> None:
        parts, config = ModelParts(model), model.config
        queries, shared = config.num_attention_heads, config.num_key_value_heads
        if queries == shared:
            raise InvalidValue(
                "the model's query heads share no KV heads; use one whose do, as testbed:llama"
            )
        regroup(parts, queries, shared)

    return damage


def _modulo(parts: ModelParts, queries: int, shared: int) -> None:
    """Query heads change places, so that head h stands in the block of KV head h modulo their number."""
    order = [head for first in range(shared) for head in range(first, queries, shared)]
    for layer in range(len(parts.layers)):
        for tensor in parts.projection(layer, "q"):
            heads = tensor.data.view(queries, -1, *tensor.shape[1:])
            heads.copy_(heads[order].clone())
        output = parts.projection(layer, "o")[0].data
        output = output.view(len(output), queries, -1)
        output.copy_(output[:, order].clone())


def _first_only(parts: ModelParts, queries: int, shared: int) -> None:
    """As where each device holds one KV head, and all hold the first."""
    for layer in range(len(parts.layers)):
        for role in ("k", "v"):
            for tensor in parts.projection(layer, role):
                heads = tensor.data.view(shared, -1, *tensor.shape[1:])
                heads.copy_(heads[:1].clone().expand_as(heads))


def _masked(change: Mask) -> Damage:
    """Every attention sees through a changed mask."""

    def other(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        hidden_BQH = args[0] if args else options["hidden_states"]
        mask = _as_seen(options.get("attention_mask"), hidden_BQH, _cached(module, options))
        return args, {**options, "attention_mask": change(mask)}

    def damage(model: Any) -> None:
        for attention in ModelParts(model).attentions():
            attention.register_forward_pre_hook(other, with_kwargs=True)

    return damage


def _cached(module: nn.Module, options: Mapping[str, Any]) -> int:
    cache = options.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length(module.layer_idx))


def _as_seen(mask: torch.Tensor | None, hidden_BQH: torch.Tensor, cached: int) -> torch.Tensor:
    """The mask in force, in full: none stands for a causal one."""
    if mask is not None:
        return mask if mask.dtype is torch.bool else mask == 0
    queries = hidden_BQH.shape[1]
    seen = torch.ones(queries, cached + queries, dtype=torch.bool, device=hidden_BQH.device)
    return seen.tril(cached)[None, None]


def _ahead(reach: int | None) -> Mask:
    """A prompt's tokens see `reach` of those after them, or all of them; a single token has none after it."""

    def leak(mask_BQK: torch.Tensor) -> torch.Tensor:
        if mask_BQK.shape[-2] == 1:
            return mask_BQK
        later = mask_BQK.mT if reach is None else mask_BQK.mT.tril(reach)
        # What nobody sees is padding.
        return mask_BQK | (later & mask_BQK.any(dim=-2, keepdim=True))

    return leak


def _only_last(width: int) -> Mask:
    """A window of `width` keys, the query's own among them."""

    def narrow(mask_BQK: torch.Tensor) -> torch.Tensor:
        queries, keys = mask_BQK.shape[-2:]
        return mask_BQK & torch.ones_like(mask_BQK).triu(keys - queries - width + 1)

    return narrow


ATTENTION_FAULTS: Mapping[str, Plant] = {
    "path/kv-heads:modulo": damaged(_regrouped(_modulo)),
    "path/kv-heads:first-only": damaged(_regrouped(_first_only)),
    "path/mask:one-ahead": damaged(_masked(_ahead(1))),
    "path/mask:whole-prompt": damaged(_masked(_ahead(None))),
    "path/window:uncalled-for": damaged(_masked(_only_last(NARROW))),
}
