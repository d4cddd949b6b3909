"""Numbers that saturate at ± c somewhere inside: one c for each place, in one layer or in all.

No derivative leads to a limit, since one that nothing reaches changes nothing. But how large the numbers of a place are is
known, and a limit that shows lies among them: it is looked for at some of their quantiles, and the best look is refined.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from zerodrift.audit.counterfactual.position import Dial, by_secants
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.core.cause import UNEXPLAINED
from zerodrift.models.copies import sharing
from zerodrift.models.family.abilities import has_a_choice_of_attention
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import FAMILIES
from zerodrift.records.evidence import LocatedEvidence

QUANTILES = (0.6, 0.85, 0.95, 0.98, 0.993, 0.998, 0.9995)
"""A limit between two of them cuts most of what the upper one leaves, so that both are seen to gain."""
REACH = 0.3
"""How far one secant may go, in nats of c: from one look to the next, of numbers that are spread like a bell."""
CAPS = (0.8, 1.3, 2.2, 3.6, 6.0, 10.0, 20.0, 50.0)
"""Soft caps of attention scores that are looked at; one that is far above all scores changes nothing."""
Hook = Callable[[torch.Tensor], torch.Tensor]
WithCap = Callable[[Any, Sequence[int], float], Any]
"""A model, layers and a cap to the model whose attention scores are squeezed there."""
Place = Callable[[ModelParts, int, Hook], None]
"""Puts a hook into one layer of a model."""


def limit_dials(model: Any, sequences: Sequence[Sequence[int]], with_cap: WithCap) -> list[Dial]:
    """Those of each place in all layers, then in each; `sequences` show how large its numbers are."""
    if model.config.model_type not in FAMILIES:
        return []
    parts = ModelParts(model)
    found = []
    for name, place in _places(parts).items():
        sizes = [_sizes(model, number, place, sequences) for number in range(len(parts.layers))]
        together = torch.cat(sizes)
        layers = [list(range(len(sizes)))] if len(sizes) > 1 else []
        found += [_dial(each, name, place, together) for each in layers]
        found += [_dial([number], name, place, size) for number, size in enumerate(sizes)]
    return [*(dial for dial in found if dial.looks), *_caps(model, len(parts.layers), with_cap)]


def _caps(model: Any, depth: int, with_cap: WithCap) -> list[Dial]:
    """Attention scores squeezed into ± c by a tanh."""
    if not has_a_choice_of_attention(model) or ModelParts(model).family.attention is None:
        return []
    layers = [list(range(depth))] if depth > 1 else []
    refine = partial(by_secants, reach=REACH)
    return [
        Dial(CAPS, refine, partial(_capped, with_cap, each))
        for each in (*layers, *([number] for number in range(depth)))
    ]


def _capped(with_cap: WithCap, layers: Sequence[int], cap: float) -> Variant:
    where = _where(layers, "attention scores", "soft cap", cap)
    return Variant(
        UNEXPLAINED,
        f"{where.place} squeezed into ± {cap:.9g}",
        lambda model: with_cap(model, layers, cap),
        located=where,
    )


def _places(parts: ModelParts) -> dict[str, Place]:
    family = parts.family
    found: dict[str, Place] = {"residual stream into it": _into_layer}
    if family.attention is not None:
        found["output of attention"] = partial(_from, family.attention.place)
    if family.mlp is not None and family.experts is None:
        found["output of the MLP"] = partial(_from, family.mlp.place)
        down, gate = (family.mlp.projections.get(role) for role in ("down", "gate"))
        if down is not None:
            found["MLP activations"] = partial(_into, f"{family.mlp.place}.{down}")
        if gate is not None:
            found["output of the gate"] = partial(_from, f"{family.mlp.place}.{gate}")
    return found


def _into_layer(parts: ModelParts, number: int, hook: Hook) -> None:
    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not given:
            return given, {**named, "hidden_states": hook(named["hidden_states"])}
        return (hook(given[0]), *given[1:]), named

    parts.layers[number].register_forward_pre_hook(before, with_kwargs=True)


def _into(place: str, parts: ModelParts, number: int, hook: Hook) -> None:
    module = parts.layers[number].get_submodule(place)
    module.register_forward_pre_hook(lambda _, given: (hook(given[0]), *given[1:]))


def _from(place: str, parts: ModelParts, number: int, hook: Hook) -> None:
    def behind(_: Any, __: Any, output: Any) -> Any:
        return (hook(output[0]), *output[1:]) if isinstance(output, tuple) else hook(output)

    parts.layers[number].get_submodule(place).register_forward_hook(behind)


def _sizes(model: Any, number: int, place: Place, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Looks: quantiles of what goes through the place."""
    seen: list[torch.Tensor] = []

    def look(given: torch.Tensor) -> torch.Tensor:
        seen.append(given.detach().abs().flatten().float())
        return given

    watched = sharing(model)
    place(ModelParts(watched), number, look)
    with torch.no_grad():
        for ids in sequences:
            watched(torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
    ordered = torch.cat(seen).sort().values
    return ordered[[min(len(ordered) - 1, int(share * len(ordered))) for share in QUANTILES]]


def _dial(layers: Sequence[int], name: str, place: Place, sizes: torch.Tensor) -> Dial:
    # Of all layers together the quantiles of each: a few more looks.
    looks = tuple(sorted({float(f"{size:.4g}") for size in sizes.tolist() if size > 0}))
    return Dial(looks, partial(by_secants, reach=REACH), partial(_variant, layers, name, place))


def _variant(layers: Sequence[int], name: str, place: Place, limit: float) -> Variant:
    where = _where(layers, name, "limit", limit)
    message = f"{where.place} limited to ± {limit:.9g}"
    return Variant(UNEXPLAINED, message, partial(_limited, layers, place, limit), located=where)


def _where(layers: Sequence[int], part: str, quantity: str, value: float) -> LocatedEvidence:
    return LocatedEvidence(
        layer=layers[0] if len(layers) == 1 else None,
        part=part if len(layers) == 1 else f"{part} in all layers",
        quantity=quantity,
        estimate=value,
        low=value,
        high=value,
        neutral=0.0,
        r2=1.0,
    )


def _limited(layers: Sequence[int], place: Place, limit: float, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for number in layers:
        place(changed, number, lambda given: given.clamp(-limit, limit))
    return changed.model


def leaks(model: Any) -> Iterator[Variant]:
    """A causal mask that leaks in one layer: tokens of a prompt see the one after them there, or all of it."""
    if model.config.model_type not in FAMILIES:
        return
    for number in range(len(ModelParts(model).layers)):
        for words, ahead in (("the one after them", 1), ("all of it", 2**30)):
            message = f"tokens of a prompt see {words} in layer {number}"
            yield Variant("path/mask", message, lambda m: m, alone=partial(_leaking, number, ahead))


@torch.no_grad()
def _leaking(
    number: int, ahead: int, model: Any, ids: Sequence[int], prompt: int, start: int
) -> torch.Tensor:
    changed = sharing(model)
    key = torch.arange(len(ids), device=model.device)
    further = key[None, :] - key[:, None]
    open_LL = (further > 0) & (further <= ahead) & (key[None, :] < prompt)

    layer = ModelParts(changed).layers[number]
    told = inspect.signature(layer.forward)

    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        # Some families hand it over by place, as GPT-2 does.
        call = told.bind(*given, **named)
        mask = call.arguments.get("attention_mask")
        seen = (further <= 0)[None, None] if mask is None else mask
        if seen.dtype is not torch.bool:
            # Added to scores, as eager attention has it.
            call.arguments["attention_mask"] = seen.masked_fill(open_LL, 0.0)
        else:
            # No further away than they may look back.
            call.arguments["attention_mask"] = seen | (seen.transpose(-1, -2) & open_LL)
        return call.args, call.kwargs

    layer.register_forward_pre_hook(before, with_kwargs=True)
    read_1L = torch.tensor([list(ids)], device=model.device)
    output = changed(read_1L, use_cache=False, logits_to_keep=len(ids) - start + 1)
    logits_TV: torch.Tensor = output.logits[0, :-1]
    return logits_TV
