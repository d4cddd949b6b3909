"""Copies of a model whose attention sees other keys: through another mask, or with other pairs of heads.

Weights are shared with the original, which is never touched. What is changed stands in the copy's own config, because
transformers hands that to whatever makes a mask.
"""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "zerodrift_other_attention"
_CHANGE = "zerodrift_attention_change"

Seen = Callable[[Any, Any, Any, Any], Any]
"""(row of the batch, head, query, key) to whether that query sees that key, as transformers has it."""


class AttentionChange(NamedTuple):
    """What is seen otherwise; None: as the model has it."""

    mask: Callable[[Seen], Seen] | None = None
    heads: tuple[int, ...] | None = None
    """The KV head that each query head reads."""


def with_attention(model: Any, change: AttentionChange) -> Any:
    """The same weights under another attention."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return computed_by(NAME, model, _CHANGE, change)


def computed_by(attention: str, model: Any, setting: str, value: object) -> Any:
    """A copy around the same weights under a registered attention, which finds `value` in its config."""
    kept = [*model.parameters(), *model.buffers()]
    changed = copy.deepcopy(model, {id(tensor): tensor for tensor in kept})
    changed.set_attn_implementation(attention)
    # Parts of a model may have a config of their own.
    for module in changed.modules():
        if (config := getattr(module, "config", None)) is not None:
            setattr(config, setting, value)
    return changed


def windowed(width: int) -> AttentionChange:
    """Nothing further back than `width` keys is seen, the query's own among them."""
    return AttentionChange(
        mask=lambda seen: lambda row, head, query, key: seen(row, head, query, key) & (query - key < width)
    )


def leaking(prompt: int, ahead: int) -> AttentionChange:
    """Tokens of a prompt see up to `ahead` of those that come after them, no further away than they may look back."""

    def leaky(seen: Seen) -> Seen:
        def wider(row: Any, head: Any, query: Any, key: Any) -> Any:
            back = seen(row, head, key, query)
            return seen(row, head, query, key) | (back & (key < prompt) & (key - query <= ahead))

        return wider

    return AttentionChange(mask=leaky)


def wrong_groupings(model: Any) -> dict[str, tuple[int, ...]]:
    """Ways to map query heads to KV heads that are not in blocks; none where every query head has its own."""
    config = model.config
    queries = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    if not queries or not shared or queries == shared or queries % shared:
        return {}
    group = queries // shared
    blocks = tuple(head // group for head in range(queries))
    found = {
        "query head h reads KV head h modulo their number": tuple(head % shared for head in range(queries)),
        "every query head reads the first KV head": (0,) * queries,
        "KV heads are read in reverse": tuple(shared - 1 - head for head in blocks),
        "every group of query heads reads the next group's KV head": tuple(
            (head + 1) % shared for head in blocks
        ),
    }
    # With one KV head there is nothing to mix up, and with two the next is the one before: the first that says so.
    first = {heads: message for message, heads in reversed(found.items())}
    return {message: heads for message, heads in found.items() if heads != blocks and first[heads] == message}


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    heads = _change(module.config).heads
    if heads is None:
        return sdpa_attention_forward(module, query, key, value, *rest, **options)
    one_each = SimpleNamespace(num_key_value_groups=1, is_causal=getattr(module, "is_causal", True))
    read: Sequence[int] = list(heads)
    return sdpa_attention_forward(one_each, query, key[:, read], value[:, read], *rest, **options)


def _mask(*, config: Any, mask_function: Seen, allow_is_causal_skip: bool = True, **options: Any) -> Any:
    change = _change(config).mask
    if change is None:
        return sdpa_mask(
            mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, config=config, **options
        )
    return sdpa_mask(mask_function=change(mask_function), allow_is_causal_skip=False, **options)


def _change(config: Any) -> AttentionChange:
    change: AttentionChange = getattr(config, _CHANGE)
    return change
