"""A model that was put together wrongly: a part that is left out or computed twice, another activation, a gain of 1 + w.

Each is a model to compare with, and shares its weights with the one that it was made of. None of these is a small change
of anything, so that no derivative leads to them: there are few enough to be tried outright.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from zerodrift.audit.counterfactual.exchanged import write
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.models.copies import sharing
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import FAMILIES
from zerodrift.records.evidence import LocatedEvidence

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu")
"""What gated and plain layers are built with, and what an engine may take instead."""
MISSING, TWICE, NEGATED = "missing", "there twice", "negated"
TIMES = {0.0: MISSING, 2.0: TWICE, -1.0: NEGATED}
"""What is left out, added twice or taken away in the place of added."""
PARTS = {"attention": "o", "MLP": "down"}
"""Parts of a layer, and the projection through which all of each goes."""


def misbuilt(model: Any) -> Iterator[Variant]:
    """What concerns all layers first. Of families that are described alone: elsewhere a norm may be read by anything."""
    if model.config.model_type not in FAMILIES:
        return
    parts = ModelParts(model)
    yield from _activations(parts)
    yield from _gains(parts)
    yield from _biases(parts)
    for place in _norm_places(parts):
        layers = [number for number, layer in enumerate(parts.layers) if _has(layer, place)]
        for chosen in ([layers] if len(layers) > 1 else []) + [[number] for number in layers]:
            yield _variant(
                chosen, len(parts.layers), place, MISSING, partial(_without_modules, chosen, (place,))
            )
    for number in range(len(parts.layers)):
        yield from _of_layer(parts, number)


def _variant(layers: Sequence[int], depth: int, part: str, quantity: str, build: Any) -> Variant:
    """In one layer, or in all."""
    everywhere = len(layers) > 1 or depth == 1
    where = LocatedEvidence(
        layer=None if everywhere else layers[0],
        part=f"{part} in all layers" if everywhere else part,
        quantity=quantity,
        estimate=1.0,
        low=1.0,
        high=1.0,
        neutral=0.0,
        r2=1.0,
    )
    return Variant(UNEXPLAINED, f"{where.place} {quantity}", build, located=where)


def _activations(parts: ModelParts) -> Iterator[Variant]:
    places, family = parts.family.mlp, parts.family
    own = getattr(parts.model.config, family.activation_setting, None)
    if places is None or places.activation is None or own is None:
        return
    at = f"{places.place}.{places.activation}"
    layers = [number for number, layer in enumerate(parts.layers) if _has(layer, at)]
    depth = len(parts.layers)
    for other in ACTIVATIONS:
        if layers and other != own:
            quantity = f"{other} instead of {own}"
            for chosen in ([layers] if len(layers) > 1 else []) + [[number] for number in layers]:
                yield _variant(
                    chosen, depth, "activation", quantity, partial(_with_activation, chosen, at, other)
                )


def _gains(parts: ModelParts) -> Iterator[Variant]:
    """Of a family whose gain is 1 + w, w alone; of any other, 1 + w. In one norm no gain at all as well."""
    offset = parts.family.norm_offset
    quantity = "gain w instead of 1 + w" if offset else "gain 1 + w instead of w"
    by = -1.0 if offset else 1.0
    layers = range(len(parts.layers))
    yield _variant(layers, 1, "norms", quantity, partial(_with_gains, by))
    for place in _norm_places(parts):
        for number in layers:
            if _has(parts.layers[number], place):
                one = partial(_with_gain, number, place)
                yield _variant([number], len(parts.layers) + 1, place, quantity, partial(one, by))
                yield _variant([number], len(parts.layers) + 1, place, "gain missing", partial(one, None))


def _biases(parts: ModelParts) -> Iterator[Variant]:
    layers = parts.layers
    if any(name.endswith("proj.bias") for name, _ in layers[0].named_parameters()):
        yield _variant(range(len(layers)), 1, "biases of projections", MISSING, _without_biases)


def _norm_places(parts: ModelParts) -> list[str]:
    attention = parts.family.attention
    inside = () if attention is None else [f"{attention.place}.{norm}" for norm in attention.norms.values()]
    return [*parts.family.norms, *inside]


def _of_layer(parts: ModelParts, number: int) -> Iterator[Variant]:
    depth = len(parts.layers) + 1
    for part, role in PARTS.items():
        for factor, quantity in TIMES.items() if parts.projection(number, role) else ():
            yield _variant([number], depth, part, quantity, partial(_times, number, (role,), factor))
    if all(parts.projection(number, role) for role in PARTS.values()):
        build = partial(_times, number, tuple(PARTS.values()), 0.0)
        yield _variant([number], depth, "all of it", MISSING, build)
    yield _variant([number], depth, "all of it", TWICE, partial(_computed_twice, number))
    middle = _before_mlp(parts, number)
    if middle is not None:
        for factor, quantity in ((0.0, MISSING), (2.0, TWICE)):
            around = partial(_residual_around_mlp, number, middle, factor)
            yield _variant([number], depth, "residual around the MLP", quantity, around)
            around = partial(_residual_around_attention, number, middle, factor)
            yield _variant([number], depth, "residual around attention", quantity, around)


def _before_mlp(parts: ModelParts, number: int) -> str | None:
    """The norm that reads the stream behind attention: the second of two, or the third of four."""
    norms = parts.family.norms
    place = {2: 1, 4: 2}.get(len(norms))
    return norms[place] if place is not None and _has(parts.layers[number], norms[place]) else None


def _has(layer: Any, place: str) -> bool:
    try:
        layer.get_submodule(place)
    except AttributeError:
        return False
    return True


def _with_activation(layers: Sequence[int], place: str, name: str, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for number in layers:
        changed.layers[number].set_submodule(place, ACT2FN[name])
    return changed.model


def _without_modules(layers: Sequence[int], places: Sequence[str], model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for number in layers:
        for place in places:
            changed.layers[number].set_submodule(place, nn.Identity())
    return changed.model


def _with_gains(by: float, model: Any) -> Any:
    changed = sharing(model)
    family = ModelParts(changed).family
    for name, parameter in changed.named_parameters():
        if family.is_norm(name) and name.endswith(".weight"):
            parameter.data = parameter.data + by
    return changed


def _with_gain(number: int, place: str, by: float | None, model: Any) -> Any:
    """Another gain of one norm: so much more, or none."""
    changed = ModelParts(sharing(model))
    weight = changed.layers[number].get_submodule(place).weight
    none = torch.full_like(weight.data, 1.0 - changed.family.norm_offset)
    weight.data = none if by is None else weight.data + by
    return changed.model


def _without_biases(model: Any) -> Any:
    changed = sharing(model)
    for name, parameter in changed.named_parameters():
        if name.endswith("proj.bias"):
            parameter.data = torch.zeros_like(parameter.data)
    return changed


@torch.no_grad()
def _times(number: int, roles: Sequence[str], factor: float, model: Any) -> Any:
    """Whatever goes through these projections, so many times."""
    changed = ModelParts(sharing(model))
    for role in roles:
        for tensor in write(changed, (number, role)):
            tensor.mul_(factor)
    return changed.model


def _computed_twice(number: int, model: Any) -> Any:
    changed = ModelParts(sharing(model))

    def again(layer: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        rest = {key: each for key, each in named.items() if key != "hidden_states"}
        # Past the hooks, of which this is one.
        return layer.forward(_hidden(output), *given[1:], **rest)

    changed.layers[number].register_forward_hook(again, with_kwargs=True)
    return changed.model


def _residual_around_mlp(number: int, middle: str, factor: float, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    layer, seen = changed.layers[number], list[torch.Tensor]()
    layer.get_submodule(middle).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    layer.register_forward_hook(lambda _, __, output: _plus(output, (factor - 1) * seen.pop()))
    return changed.model


def _residual_around_attention(number: int, middle: str, factor: float, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    layer, seen = changed.layers[number], list[torch.Tensor]()

    def enters(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(given[0] if given else named["hidden_states"])

    layer.register_forward_pre_hook(enters, with_kwargs=True)
    layer.get_submodule(middle).register_forward_pre_hook(
        lambda _, given: (given[0] + (factor - 1) * seen[-1], *given[1:])
    )
    layer.register_forward_hook(lambda _, __, output: _plus(output, (factor - 1) * seen.pop()))
    return changed.model


def _hidden(output: Any) -> torch.Tensor:
    """Some layers give their hidden states alone, others first of several."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _plus(output: Any, added: torch.Tensor) -> Any:
    return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added
