"""Heads of one layer in each other's place: queries that read the keys and values of another group, or two heads exchanged.

Rows of a projection belong to heads, so that each is a model with some rows exchanged. Of many heads neighbours alone are
tried: a layer of 32 has 496 pairs, and what is off by one is off by one everywhere. Queries of one head that stand a position
further on or back are tried too: a whole position turns the fastest channels by a radian, which no derivative follows.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch

from zerodrift.audit.counterfactual.exchanged import write
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.models.copies import sharing
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import FAMILIES
from zerodrift.records.evidence import LocatedEvidence

FEW_HEADS = 4
"""Up to so many every pair is tried."""
STORED = {"keys and values": ("k", "v"), "keys": ("k",), "values": ("v",)}
QUERIES = {"queries": ("q",)}


def exchanged_heads(model: Any) -> Iterator[Variant]:
    """What is stored of KV heads first, then query heads; of families that are described alone."""
    if model.config.model_type not in FAMILIES:
        return
    parts, config = ModelParts(model), model.config
    if parts.family.attention is None or parts.family.attention.fused is not None:
        # Heads of a fused projection lie otherwise in each family.
        return
    heads = getattr(config, "num_attention_heads", 0)
    stored = getattr(config, "num_key_value_heads", None) or heads
    for kinds, count in ((STORED, stored), (QUERIES, heads)):
        for number in range(len(parts.layers)):
            for part, roles in kinds.items():
                if all(_has_heads(parts, number, role, count) for role in roles):
                    for pair in _pairs(count):
                        yield _variant(number, part, roles, pair, count)


def moved_heads(model: Any) -> Iterator[Variant]:
    """Queries of one head, a position away from where they belong; where all layers have one table of frequencies."""
    parts, config = ModelParts(model), model.config
    tables = list(parts.frequencies())
    places = parts.family.attention
    if config.model_type not in FAMILIES or places is None or places.fused is not None or len(tables) != 1:
        return
    # Turned before the norm of a head a query would be another.
    place = f"{places.place}.{places.norms.get('q', places.projections.get('q'))}"
    for number in range(len(parts.layers)):
        for head in range(config.num_attention_heads):
            for by in (1, -1):
                where = LocatedEvidence(
                    layer=number,
                    part="queries of head",
                    index=head,
                    quantity="offset",
                    estimate=by,
                    low=by,
                    high=by,
                    neutral=0.0,
                    r2=1.0,
                )
                message = f"{where.place} one position {'further on' if by > 0 else 'back'}"
                build = partial(_with_head_moved, number, place, head, by)
                yield Variant(UNEXPLAINED, message, build, located=where)


def _with_head_moved(number: int, place: str, head: int, by: int, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    ((table, name),) = changed.frequencies()
    angles_F = by * getattr(table, name).to(model.dtype)
    turn, rise, half = angles_F.cos(), angles_F.sin(), len(angles_F)

    def behind(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        heads = output.reshape(*output.shape[:2], model.config.num_attention_heads, -1).clone()
        one, other = heads[:, :, head, :half].clone(), heads[:, :, head, half : 2 * half].clone()
        heads[:, :, head, :half] = one * turn - other * rise
        heads[:, :, head, half : 2 * half] = other * turn + one * rise
        return heads.reshape(output.shape)

    changed.layers[number].get_submodule(place).register_forward_hook(behind)
    return changed.model


def _pairs(count: int) -> list[tuple[int, int]]:
    every = list(combinations(range(count), 2))
    return every if count <= FEW_HEADS else [(one, two) for one, two in every if two == one + 1]


def _has_heads(parts: ModelParts, number: int, role: str, count: int) -> bool:
    tensors = parts.projection(number, role)
    return count > 1 and bool(tensors) and all(tensor.shape[0] % count == 0 for tensor in tensors)


def _variant(number: int, part: str, roles: Sequence[str], pair: tuple[int, int], count: int) -> Variant:
    where = LocatedEvidence(
        layer=number,
        part=f"{part} of heads {pair[0]} and {pair[1]}",
        quantity="exchanged",
        estimate=1.0,
        low=1.0,
        high=1.0,
        neutral=0.0,
        r2=1.0,
    )
    build = partial(_with_heads_exchanged, number, roles, pair, count)
    return Variant(UNEXPLAINED, f"{where.place} exchanged", build, located=where)


@torch.no_grad()
def _with_heads_exchanged(
    number: int, roles: Sequence[str], pair: tuple[int, int], count: int, model: Any
) -> Any:
    changed = ModelParts(sharing(model))
    for role in roles:
        for tensor in write(changed, (number, role)):
            by_head = tensor.view(count, -1, *tensor.shape[1:])
            by_head[list(pair)] = by_head[list(reversed(pair))].clone()
    return changed.model
