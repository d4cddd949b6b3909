"""Weights that stand in each other's place: every exchange that a model has the shapes for, as models to compare with.

A changed model shares all numbers with the one it was made of, but for the tensors that were exchanged: there are
thousands of exchanges in a deep model, and a copy of all weights for each would cost as much as its forward.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch

from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.models.copies import sharing
from zerodrift.models.family.parts import ModelParts
from zerodrift.records.evidence import LocatedEvidence

SWAPPED = "weights/swapped"
ROLES = ("q", "k", "v", "o", "gate", "up", "down")
"""Projections of a layer, as families name them."""
LIKELY = (("gate", "up"), ("k", "v"), ("q", "k"), ("q", "o"))
"""Projections of a layer that are taken for each other; those of one shape may be."""
MOST_EXCHANGES = 2000
"""Of a 30-layer model about half of its 435 pairs of layers, with seven projections each; what is nearest is asked first."""


def exchanges(model: Any) -> Iterator[Variant]:
    """From the likeliest to the oddest, `MOST_EXCHANGES` at most."""
    parts = ModelParts(model)
    found = [*_of_the_ends(parts)]
    if parts.family.layers is not None:
        found = [*_in_layers(parts), *found, *_transposed(parts), *_moved(parts), *_between_layers(parts)]
    yield from found[:MOST_EXCHANGES]


def has(parts: ModelParts, one: str, other: str) -> bool:
    """Whether some layer has both, of one shape: only those can stand in each other's place."""
    return parts.family.layers is not None and any(
        _alike(parts, (layer, one), (layer, other)) for layer in range(len(parts.layers))
    )


Place = tuple[int, str]
"""A layer, and the role of a projection in it."""


def _shapes(parts: ModelParts, place: Place) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in parts.projection(*place))


def _alike(parts: ModelParts, one: Place, other: Place) -> bool:
    return _shapes(parts, one) == _shapes(parts, other) != ()


def _in_layers(parts: ModelParts) -> Iterator[Variant]:
    """Two projections of a layer: in all layers, or in one."""
    layers = range(len(parts.layers))
    for one, other in LIKELY:
        pairs = [
            ((layer, one), (layer, other)) for layer in layers if _alike(parts, (layer, one), (layer, other))
        ]
        names = f"{parts.role_name(one)} and {parts.role_name(other)}"
        if len(pairs) > 1:
            yield Variant(SWAPPED, f"{names} exchanged in every layer", partial(_with_exchanged, pairs))
        for pair in pairs:
            message = f"{names} of layer {pair[0][0]} exchanged"
            yield Variant(SWAPPED, message, partial(_with_exchanged, [pair]))
    yield from _norms_in_layers(parts)


def _norms_in_layers(parts: ModelParts) -> Iterator[Variant]:
    family = parts.family
    inside = () if family.attention is None else family.attention.norms.values()
    attention = "" if family.attention is None else f"{family.attention.place}."
    places = [*family.norms, *(f"{attention}{place}" for place in inside)]
    for one, other in combinations(places, 2):
        alike = [
            number
            for number, layer in enumerate(parts.layers)
            if _may_be_exchanged(_weight(layer, one), _weight(layer, other))
        ]
        names = f"{one.rpartition('.')[2]} and {other.rpartition('.')[2]}"
        if len(alike) > 1:
            message = f"{names} exchanged in every layer"
            yield Variant(SWAPPED, message, partial(_with_modules_exchanged, one, other, alike))
        for number in alike:
            message = f"{names} of layer {number} exchanged"
            yield Variant(SWAPPED, message, partial(_with_modules_exchanged, one, other, [number]))


def _weight(layer: Any, place: str) -> torch.Tensor | None:
    try:
        weight: torch.Tensor | None = getattr(layer.get_submodule(place), "weight", None)
    except AttributeError:
        return None
    return weight


def _may_be_exchanged(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Norms that nobody trained are all the same."""
    return one is not None and other is not None and one.shape == other.shape and not torch.equal(one, other)


def _of_the_ends(parts: ModelParts) -> Iterator[Variant]:
    """Embedding and head, where they are two tensors."""
    embedding, head = parts.model.get_input_embeddings(), parts.model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is head.weight:
        return
    if embedding.weight.shape == head.weight.shape:
        yield Variant(SWAPPED, "embedding and head exchanged", _with_ends_exchanged)
        yield Variant(SWAPPED, "the embedding stands in the place of the head", _with_embedding_as_head)


def _moved(parts: ModelParts) -> Iterator[Variant]:
    """All layers by one place, where they are alike."""
    shapes = _layer_shapes(parts)
    if len(shapes) > 1 and all(each == shapes[0] for each in shapes):
        for step, word in ((1, "late"), (-1, "early")):
            message = f"every layer arrived one place too {word}"
            yield Variant(SWAPPED, message, partial(_with_layers_moved, step))


def _layer_shapes(parts: ModelParts) -> list[dict[str, torch.Size]]:
    return [{name: each.shape for name, each in layer.named_parameters()} for layer in parts.layers]


def _between_layers(parts: ModelParts) -> Iterator[Variant]:
    """All of two layers, or one projection of theirs."""
    shapes = _layer_shapes(parts)
    for first, second in _nearest_first(len(shapes)):
        if shapes[first] == shapes[second]:
            message = f"layers {first} and {second} arrived under each other's names"
            yield Variant(SWAPPED, message, partial(_with_layers_exchanged, first, second))
        for role in ROLES:
            pair = ((first, role), (second, role))
            if _alike(parts, *pair):
                message = f"{parts.role_name(role)} of layers {first} and {second} exchanged"
                yield Variant(SWAPPED, message, partial(_with_exchanged, [pair]))


def _transposed(parts: ModelParts) -> Iterator[Variant]:
    """Where a tensor is square its transpose fits as well."""
    for role in ROLES:
        square = [
            (layer, role)
            for layer in range(len(parts.layers))
            if any(
                each.dim() == 2 and each.shape[0] == each.shape[1] for each in parts.projection(layer, role)
            )
        ]
        name = parts.role_name(role)
        if len(square) > 1:
            message = f"{name} transposed in every layer"
            where = _is_transposed(None, f"{name} in all layers")
            yield Variant(UNEXPLAINED, message, partial(_with_transposed, square), located=where)
        for place in square:
            message, where = f"{name} of layer {place[0]} transposed", _is_transposed(place[0], name)
            yield Variant(UNEXPLAINED, message, partial(_with_transposed, [place]), located=where)


def _is_transposed(layer: int | None, part: str) -> LocatedEvidence:
    return LocatedEvidence(
        layer=layer, part=part, quantity="transposed", estimate=1.0, low=1.0, high=1.0, neutral=0.0, r2=1.0
    )


def _nearest_first(layers: int) -> list[tuple[int, int]]:
    """All pairs: neighbours, the ends, and then the others by how far apart they are."""
    ends = (0, layers - 1)
    return sorted(combinations(range(layers), 2), key=lambda pair: 1.5 if pair == ends else pair[1] - pair[0])


@torch.no_grad()
def _with_exchanged(pairs: Sequence[tuple[Place, Place]], model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for one, other in pairs:
        write(changed, one)
        # Last, because both may be parts of one tensor.
        others = write(changed, other)
        _exchange(changed.projection(*one), others)
    return changed.model


@torch.no_grad()
def _with_transposed(places: Sequence[Place], model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for place in places:
        for tensor in write(changed, place):
            if tensor.dim() == 2:
                tensor.copy_(tensor.T.clone())
    return changed.model


def write(parts: ModelParts, place: Place) -> tuple[torch.Tensor, ...]:
    """The tensors of a projection, to be written to: from here on they are shared with no other model."""
    for tensor in parts.projection(*place):
        # Of one that is part of a fused tensor, all of that.
        whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - torch shows it nowhere else
        whole.data = whole.data.clone()
    return parts.projection(*place)


def _exchange(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _point(some: Any, others: Any) -> None:
    """Parameters of two modules at each other's numbers."""
    for one, other in zip(some.parameters(), others.parameters(), strict=True):
        one.data, other.data = other.data, one.data


def _with_modules_exchanged(one: str, other: str, layers: Sequence[int], model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for number in layers:
        layer = changed.layers[number]
        _point(layer.get_submodule(one), layer.get_submodule(other))
    return changed.model


def _with_layers_exchanged(first: int, second: int, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    _point(changed.layers[first], changed.layers[second])
    return changed.model


def _with_layers_moved(step: int, model: Any) -> Any:
    """Layer i holds what was meant for layer i - step; what would come from beyond the ends stays at home."""
    changed, here = ModelParts(sharing(model)), ModelParts(model).layers
    for index, layer in enumerate(changed.layers):
        meant = here[min(max(index - step, 0), len(here) - 1)]
        for own, other in zip(layer.parameters(), meant.parameters(), strict=True):
            own.data = other.data
    return changed.model


def _with_ends_exchanged(model: Any) -> Any:
    changed = sharing(model)
    embedding, head = changed.get_input_embeddings(), changed.get_output_embeddings()
    embedding.weight.data, head.weight.data = head.weight.data, embedding.weight.data
    return changed


def _with_embedding_as_head(model: Any) -> Any:
    changed = sharing(model)
    changed.get_output_embeddings().weight.data = changed.get_input_embeddings().weight.data
    return changed
