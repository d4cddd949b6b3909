"""What else may an update have done, if it did not simply arrive or stay away? Each is a model to compare with.

Values that arrived under another name, in another dtype, at one end of a tie only, or beside a buffer that was not
rebuilt: the engine would then answer exactly like the model built here.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch

FEW_LAYERS = 8


class Delivery(NamedTuple):
    """One way for an update to go wrong."""

    cause: str
    says: str
    build: Callable[[], Any]
    """The model that the engine would then be."""


def deliveries(old: Any, new: Any) -> Iterator[Delivery]:
    """Every way that is known, from the likeliest to the oddest."""
    yield Delivery("weights/dtype", "the update arrived rounded to bf16", lambda: _rounded(new))
    if getattr(new.config, "tie_word_embeddings", False):
        yield Delivery(
            "weights/tied-head", "the embedding was updated and the head was not", lambda: _untied(new, old)
        )
        yield Delivery(
            "weights/tied-head",
            "the head was updated and the embedding was not",
            lambda: _untied(old, new, new),
        )
    for one, other in (("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("q_proj", "k_proj")):
        yield from _swaps_within(new, one, other)
    for first, second in _layer_pairs(len(new.model.layers)):
        says = f"layers {first} and {second} arrived under each other's names"
        yield Delivery(
            "weights/swapped",
            says,
            partial(_swapped, new, f".layers.{first}.", f".layers.{second}."),
        )
    yield Delivery(
        "weights/buffer", "rotary frequencies rounded to bf16", lambda: _with_frequencies(new, _to_bf16)
    )
    yield Delivery(
        "weights/buffer", "rotary frequencies zero", lambda: _with_frequencies(new, torch.zeros_like)
    )


def _layer_pairs(layers: int) -> list[tuple[int, int]]:
    """Layers that may have changed places: any two of a few, neighbours and the ends of many.

    Each pair costs a forward; all pairs of 30 layers would cost 435.
    """
    if layers <= FEW_LAYERS:
        return list(combinations(range(layers), 2))
    return [*pairwise(range(layers)), (0, layers - 1)]


def _rounded(model: Any) -> Any:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))
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


def _swaps_within(model: Any, one: str, other: str) -> Iterator[Delivery]:
    """Two projections of a layer exchanged: in all layers, or in one."""
    state = model.state_dict()
    pairs = [name for name in state if one in name and other in name.replace(one, other)]
    pairs = [name for name in pairs if state[name].shape == state[name.replace(one, other)].shape]
    if not pairs:
        return
    yield Delivery(
        "weights/swapped", f"{one} and {other} exchanged in every layer", lambda: _swapped(model, one, other)
    )
    for layer in range(len(model.model.layers)):
        here = f".layers.{layer}."
        yield Delivery(
            "weights/swapped",
            f"{one} and {other} of layer {layer} exchanged",
            partial(_swapped, model, one, other, within=here),
        )


def _swapped(model: Any, one: str, other: str, within: str = "") -> Any:
    changed = copy.deepcopy(model)
    state = changed.state_dict()
    for name in [name for name in state if one in name and within in name]:
        twin = name.replace(one, other)
        kept = state[name].clone()
        state[name].copy_(state[twin])
        state[twin].copy_(kept)
    return changed


def _with_frequencies(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = copy.deepcopy(model)
    for module in changed.modules():
        if getattr(module, "inv_freq", None) is not None:
            module.inv_freq = change(module.inv_freq)
    return changed
