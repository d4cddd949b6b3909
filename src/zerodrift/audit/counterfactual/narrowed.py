"""One part of the model in less precision than the rest: weights of a projection, what a part gives, keys and values.

Each is a model to compare with. Where nothing else rounds, the numbers that an engine stored in a narrow dtype are
predicted one by one, and Δ falls with them; what foreign kernels round in between is predicted by none of these.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from zerodrift.audit.counterfactual.exchanged import write
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.models.copies import sharing
from zerodrift.models.family.abilities import has_a_choice_of_attention
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import FAMILIES

ATTENTION = "zerodrift_narrow_kv"
_ROUNDED = "_zerodrift_rounded"
FP8_MAX = 448.0
"""Largest finite e4m3."""
Rounded = Callable[[torch.Tensor], torch.Tensor]


def _through(dtype: torch.dtype, given: torch.Tensor) -> torch.Tensor:
    if dtype is torch.float8_e4m3fn:
        given = given.clamp(-FP8_MAX, FP8_MAX)
    return given.to(dtype).to(given.dtype)


def _int8(sizes: Rounded, given: torch.Tensor) -> torch.Tensor:
    scale = sizes(given).clamp(min=1e-12) / 127
    return (given / scale).round() * scale


DTYPES: dict[str, Rounded] = {
    "bf16": partial(_through, torch.bfloat16),
    "fp16": partial(_through, torch.float16),
    "fp8": partial(_through, torch.float8_e4m3fn),
}
INTEGERS: dict[str, Rounded] = {
    "int8 per row": partial(_int8, lambda given: given.abs().amax(dim=-1, keepdim=True)),
    "int8 per tensor": partial(_int8, lambda given: given.abs().amax()),
}
WEIGHTS = (
    *(("gate", "up"), ("down",), ("q", "k", "v"), ("o",), ("q", "k", "v", "o"), ("gate", "up", "down")),
    *(("q", "k", "v", "o", "gate", "up", "down"), ("q",), ("k",), ("v",), ("gate",), ("up",)),
)
"""Roles of projections that engines store together, then each by itself."""
STORED = {"keys and values": (True, True), "keys": (True, False), "values": (False, True)}
GIVEN = {"outputs of attention and MLP": ("attention", "mlp"), "attention": ("attention",), "MLP": ("mlp",)}


def narrowed(model: Any) -> Iterator[Variant]:
    """In all layers first, then in each; of families that are described alone."""
    if model.config.model_type not in FAMILIES:
        return
    depth = len(ModelParts(model).layers)
    for layers in ([list(range(depth))] if depth > 1 else []) + [[number] for number in range(depth)]:
        where = f"layer {layers[0]}" if len(layers) == 1 else "all layers"
        yield from _stored(model, layers, where)
        yield from _given(model, layers, where)
        yield from _streamed(model, layers, where)
        yield from _weights(model, layers, where)


def _stored(model: Any, layers: Sequence[int], where: str) -> Iterator[Variant]:
    if not has_a_choice_of_attention(model) or ModelParts(model).family.attention is None:
        return
    for part, which in STORED.items():
        for name, rounded in DTYPES.items():
            build = partial(_with_stored, layers, which, rounded)
            yield Variant("path/kv-precision", f"{part} of {where} in {name}", build)


def _given(model: Any, layers: Sequence[int], where: str) -> Iterator[Variant]:
    family = ModelParts(model).family
    places = {"attention": family.attention, "mlp": family.mlp}
    for part, which in GIVEN.items():
        if any(places[each] is None for each in which):
            continue
        for name, rounded in DTYPES.items():
            build = partial(_with_given, layers, which, rounded)
            yield Variant("path/body-precision", f"{part} of {where} rounded to {name}", build)


def _streamed(model: Any, layers: Sequence[int], where: str) -> Iterator[Variant]:
    """The residual stream itself, where it goes into a layer, and what norms make of it."""
    for name, rounded in DTYPES.items():
        build = partial(_with_stream, layers, rounded)
        yield Variant("path/body-precision", f"residual stream into {where} rounded to {name}", build)
    for place in ModelParts(model).family.norms:
        for name, rounded in DTYPES.items():
            build = partial(_with_outputs, layers, place, rounded)
            yield Variant("path/body-precision", f"output of {place} of {where} rounded to {name}", build)


def _weights(model: Any, layers: Sequence[int], where: str) -> Iterator[Variant]:
    parts = ModelParts(model)
    for roles in WEIGHTS:
        if not all(parts.projection(number, role) for number in layers for role in roles):
            continue
        names = ", ".join(parts.role_name(role) for role in roles)
        for name, rounded in {**DTYPES, **INTEGERS}.items():
            cause = "path/body-precision" if name in ("bf16", "fp16") else "path/weight-quantisation"
            build = partial(_with_weights, layers, roles, rounded)
            yield Variant(cause, f"weights {names} of {where} in {name}", build)


@torch.no_grad()
def _with_weights(layers: Sequence[int], roles: Sequence[str], rounded: Rounded, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for number in layers:
        for role in roles:
            for tensor in write(changed, (number, role)):
                if tensor.dim() > 1:
                    tensor.copy_(rounded(tensor))
    return changed.model


def _with_given(layers: Sequence[int], which: Sequence[str], rounded: Rounded, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    places = {"attention": changed.family.attention, "mlp": changed.family.mlp}
    for number in layers:
        for name in which:
            place = places[name]
            assert place is not None
            module = changed.layers[number].get_submodule(place.place)
            module.register_forward_hook(lambda _, __, output: _first(rounded, output))
    return changed.model


def _with_stream(layers: Sequence[int], rounded: Rounded, model: Any) -> Any:
    changed = ModelParts(sharing(model))

    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not given:
            return given, {**named, "hidden_states": rounded(named["hidden_states"])}
        return (rounded(given[0]), *given[1:]), named

    for number in layers:
        changed.layers[number].register_forward_pre_hook(before, with_kwargs=True)
    return changed.model


def _with_outputs(layers: Sequence[int], place: str, rounded: Rounded, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for number in layers:
        module = changed.layers[number].get_submodule(place)
        module.register_forward_hook(lambda _, __, output: _first(rounded, output))
    return changed.model


def _first(rounded: Rounded, output: Any) -> Any:
    """Attention gives its hidden states first of several."""
    return (rounded(output[0]), *output[1:]) if isinstance(output, tuple) else rounded(output)


def _with_stored(layers: Sequence[int], which: tuple[bool, bool], rounded: Rounded, model: Any) -> Any:
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    changed = sharing(model)
    changed.set_attn_implementation(ATTENTION)
    attentions = ModelParts(changed).attentions()
    for number in layers:
        attentions[number].__dict__[_ROUNDED] = tuple(rounded if each else None for each in which)
    return changed


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> Any:
    of_keys, of_values = module.__dict__.get(_ROUNDED, (None, None))
    key = key if of_keys is None else of_keys(key)
    value = value if of_values is None else of_values(value)
    return sdpa_attention_forward(module, query, key, value, *args, **options)
