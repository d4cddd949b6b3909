"""What else may an update have done, if it did not simply arrive or stay away? Each is a model to compare with.

Values that arrived under another name, in another dtype, at one end of a tie only, or beside a buffer that was not
rebuilt: the engine would then answer exactly like the model built here.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch

from zerodrift.models.family.parts import ModelParts

FEW_LAYERS = 8
SWAPS = (("gate", "up"), ("k", "v"), ("q", "k"))
"""Projections that arrive in each other's place."""


class Delivery(NamedTuple):
    """One way for an update to go wrong."""

    cause: str
    says: str
    build: Callable[[], Any]
    """The model that the engine would then be."""


def deliveries(old: Any, new: Any) -> Iterator[Delivery]:
    """Every way that is known and that this model has the parts for, from the likeliest to the oddest."""
    parts = ModelParts(new)
    yield Delivery("weights/dtype", "the update arrived rounded to bf16", lambda: _rounded(new))
    yield Delivery(
        "weights/dtype",
        "vectors (norms, biases) arrived rounded to bf16",
        lambda: _rounded(new, lambda parameter: parameter.dim() == 1),
    )
    if _tied(new):
        yield Delivery(
            "weights/tied-head", "the embedding was updated and the head was not", lambda: _untied(new, old)
        )
        yield Delivery(
            "weights/tied-head",
            "the head was updated and the embedding was not",
            lambda: _untied(old, new, new),
        )
    for one, other in SWAPS:
        yield from _swaps_within(parts, one, other)
    if _has(parts, "gate", "up"):
        yield Delivery(
            "weights/swapped",
            f"rows of {parts.role_name('gate')} and {parts.role_name('up')} arrived in turn, where one was expected "
            "after the other",
            lambda: _interleaved(new),
        )
    yield from _layers_elsewhere(parts)
    if any(True for _ in parts.frequencies()):
        yield Delivery(
            "weights/buffer", "rotary frequencies rounded to bf16", lambda: _with_frequencies(new, _to_bf16)
        )
        yield Delivery(
            "weights/buffer", "rotary frequencies zero", lambda: _with_frequencies(new, torch.zeros_like)
        )
    if parts.family.rotary is not None:
        yield Delivery("weights/buffer", "rotary tables zero", lambda: _without_tables(new))


def not_asked(model: Any) -> tuple[str, ...]:
    """Ways for an update to go wrong that this model has no parts for, or none under a name that is known here."""
    parts = ModelParts(model)
    missing = [
        f"{one} and {other} projections exchanged" for one, other in SWAPS if not _has(parts, one, other)
    ]
    if parts.family.layers is None:
        missing.append("layers exchanged or moved")
    if not any(True for _ in parts.frequencies()):
        missing.append("rotary frequencies left wrong")
    return tuple(missing)


def _tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _has(parts: ModelParts, one: str, other: str) -> bool:
    """Whether some layer has both, of one shape: only those can arrive in each other's place."""
    return parts.family.layers is not None and any(
        _shapes(parts, layer, one) == _shapes(parts, layer, other) != () for layer in range(len(parts.layers))
    )


def _shapes(parts: ModelParts, layer: int, role: str) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in parts.projection(layer, role))


def _layers_elsewhere(parts: ModelParts) -> Iterator[Delivery]:
    """Whole layers in the place of others, where they are alike."""
    if parts.family.layers is None:
        return
    shapes = [{name: each.shape for name, each in layer.state_dict().items()} for layer in parts.layers]
    if all(each == shapes[0] for each in shapes):
        for step in (1, -1):
            yield Delivery(
                "weights/swapped",
                f"every layer arrived one place too {'late' if step == 1 else 'early'}",
                partial(_moved_on, parts.model, step),
            )
    for first, second in _layer_pairs(len(shapes)):
        if shapes[first] == shapes[second]:
            says = f"layers {first} and {second} arrived under each other's names"
            yield Delivery("weights/swapped", says, partial(_swapped_layers, parts.model, first, second))


def _layer_pairs(layers: int) -> list[tuple[int, int]]:
    """Layers that may have changed places: any two of a few, neighbours and the ends of many.

    Each pair costs a forward; all pairs of 30 layers would cost 435.
    """
    if layers <= FEW_LAYERS:
        return list(combinations(range(layers), 2))
    return [*pairwise(range(layers)), (0, layers - 1)]


def _rounded(model: Any, which: Callable[[torch.Tensor], bool] = lambda _: True) -> Any:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in filter(which, changed.parameters()):
            parameter.copy_(_to_bf16(parameter))
    return changed


def _to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def _untied(body: Any, head: Any, rest: Any = None) -> Any:
    """`body`'s embedding under `head`'s head; every other tensor is `rest`'s, or `body`'s where not given."""
    changed = copy.deepcopy(body if rest is None else rest)
    weight = head.get_input_embeddings().weight.detach().clone()
    embedding = body.get_input_embeddings().weight.detach().clone()
    changed.get_input_embeddings().weight = torch.nn.Parameter(embedding, requires_grad=False)
    changed.get_output_embeddings().weight = torch.nn.Parameter(weight, requires_grad=False)
    return changed


def _swaps_within(parts: ModelParts, one: str, other: str) -> Iterator[Delivery]:
    """Two projections of a layer exchanged: in all layers, or in one."""
    if not _has(parts, one, other):
        return
    model, names = parts.model, f"{parts.role_name(one)} and {parts.role_name(other)}"
    yield Delivery(
        "weights/swapped", f"{names} exchanged in every layer", lambda: _swapped(model, one, other)
    )
    for layer in range(len(parts.layers)):
        yield Delivery(
            "weights/swapped",
            f"{names} of layer {layer} exchanged",
            partial(_swapped, model, one, other, only=layer),
        )


@torch.no_grad()
def _swapped(model: Any, one: str, other: str, only: int | None = None) -> Any:
    changed = ModelParts(copy.deepcopy(model))
    for layer in range(len(changed.layers)) if only is None else (only,):
        if _shapes(changed, layer, one) == _shapes(changed, layer, other):
            _exchange(changed.projection(layer, one), changed.projection(layer, other))
    return changed.model


def _swapped_layers(model: Any, first: int, second: int) -> Any:
    changed = ModelParts(copy.deepcopy(model))
    with torch.no_grad():
        _exchange(*(tuple(changed.layers[layer].state_dict().values()) for layer in (first, second)))
    return changed.model


def _exchange(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


@torch.no_grad()
def _interleaved(model: Any) -> Any:
    changed = ModelParts(copy.deepcopy(model))
    for layer in range(len(changed.layers)):
        for gate, up in zip(changed.projection(layer, "gate"), changed.projection(layer, "up"), strict=True):
            # Rows are the last dimension but one, of a bias the only one.
            rows = -2 if gate.dim() > 1 else -1
            packed = torch.stack([gate, up], dim=rows).flatten(rows - 1, rows)
            for target, half in zip((gate, up), packed.chunk(2, dim=rows), strict=True):
                target.copy_(half)
    return changed.model


def _moved_on(model: Any, step: int) -> Any:
    """Layer i holds what was meant for layer i - step; what would come from beyond the ends stays at home."""
    changed, here = ModelParts(copy.deepcopy(model)), ModelParts(model).layers
    for index, layer in enumerate(changed.layers):
        layer.load_state_dict(here[min(max(index - step, 0), len(here) - 1)].state_dict())
    return changed.model


class _NoTables(torch.nn.Module):
    """Cosines and sines of zero: attention sees neither positions nor queries."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self.rotary(*args, **options)
        return torch.zeros_like(cosines), torch.zeros_like(sines)


def _without_tables(model: Any) -> Any:
    changed = ModelParts(copy.deepcopy(model))
    changed.replace_rotary(_NoTables(changed.rotary))
    return changed.model


def _with_frequencies(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = copy.deepcopy(model)
    for module, name in list(ModelParts(changed).frequencies()):
        setattr(module, name, change(getattr(module, name)))
    return changed
