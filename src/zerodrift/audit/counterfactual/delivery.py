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
    yield Delivery(
        "weights/dtype",
        "vectors (norms, biases) arrived rounded to bf16",
        lambda: _rounded(new, lambda parameter: parameter.dim() == 1),
    )
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
    yield Delivery(
        "weights/swapped",
        "rows of gate_proj and up_proj arrived in turn, where one was expected after the other",
        lambda: _interleaved(new),
    )
    for step in (1, -1):
        yield Delivery(
            "weights/swapped",
            f"every layer arrived one place too {'late' if step == 1 else 'early'}",
            partial(_moved_on, new, step),
        )
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
    yield Delivery("weights/buffer", "rotary tables zero", lambda: _without_tables(new))


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


def _interleaved(model: Any) -> Any:
    changed = copy.deepcopy(model)
    for layer in changed.model.layers:
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        packed = torch.stack([gate.detach(), up.detach()], dim=1).flatten(0, 1)
        gate.data, up.data = (half.clone() for half in packed.chunk(2))
    return changed


def _moved_on(model: Any, step: int) -> Any:
    """Layer i holds what was meant for layer i - step; what would come from beyond the ends stays at home."""
    changed = copy.deepcopy(model)
    last = len(model.model.layers) - 1
    for index, layer in enumerate(changed.model.layers):
        layer.load_state_dict(model.model.layers[min(max(index - step, 0), last)].state_dict())
    return changed


class _NoTables(torch.nn.Module):
    """Cosines and sines of zero: attention sees neither positions nor queries."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self.rotary(*args, **options)
        return torch.zeros_like(cosines), torch.zeros_like(sines)


def _without_tables(model: Any) -> Any:
    changed = copy.deepcopy(model)
    changed.model.rotary_emb = _NoTables(changed.model.rotary_emb)
    return changed


def _with_frequencies(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = copy.deepcopy(model)
    for module in changed.modules():
        if getattr(module, "inv_freq", None) is not None:
            module.inv_freq = change(module.inv_freq)
    return changed
