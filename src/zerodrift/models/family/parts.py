"""The parts of a given model, found by the description of its family. What is not there is refused by its name."""

from collections.abc import Iterator
from typing import Any

import torch

from zerodrift.core.errors import UnsupportedModel
from zerodrift.models.family.base import Family
from zerodrift.models.family.registry import family_of


class ModelParts:
    """A transformers causal LM, seen through its family."""

    def __init__(self, model: Any, family: Family | None = None) -> None:
        """`family` is found by the model's type unless given."""
        self.model = model
        self.family = family_of(model) if family is None else family

    @property
    def decoder(self) -> Any:
        """Everything but the head."""
        return self.at(self.family.decoder, "decoder")

    @property
    def layers(self) -> list[Any]:
        """In the order of the forward."""
        return list(self.at(self.family.below_decoder(self.family.layers), "list of layers"))

    @property
    def embedding(self) -> Any:
        """Tokens to hidden states."""
        return self.at(self.family.below_decoder(self.family.embedding), "embedding")

    @property
    def final_norm(self) -> Any:
        """Between the last layer and the head."""
        return self.at(self.family.below_decoder(self.family.final_norm), "final norm")

    @property
    def head(self) -> Any:
        """Hidden states to logits."""
        return self.at(self.family.head, "head")

    @property
    def rotary(self) -> Any:
        """Cosines and sines of positions."""
        return self.at(self.family.below_decoder(self.family.rotary), "rotary embedding")

    def replace_rotary(self, module: Any) -> None:
        """Put another in its place."""
        self.at(self.family.below_decoder(self.family.rotary), "rotary embedding")
        self.model.set_submodule(self.family.below_decoder(self.family.rotary), module)

    def attention(self, layer: int) -> Any:
        """The attention of one layer."""
        place = None if self.family.attention is None else self.family.attention.place
        return self.at(place, "attention", self.layers[layer])

    def attentions(self) -> list[Any]:
        """Those of all layers."""
        return [self.attention(layer) for layer in range(len(self.layers))]

    def frequencies(self) -> Iterator[tuple[Any, str]]:
        """Every table of rotary frequencies in force: the module that holds it, and its name there."""
        for module in self.model.modules():
            for name, _ in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and "original" not in name:
                    yield module, name

    def projection(self, layer: int, role: str) -> tuple[torch.Tensor, ...]:
        """Weight and bias of a layer's q, k, v, o, gate, up or down, as views to read and write; () where it has none."""
        for holder, places in self._holders(self.layers[layer]):
            if place := getattr(places, "projections", {}).get(role):
                return _tensors(holder.get_submodule(place))
            fused = getattr(places, "fused", None) or getattr(places, "gate_up", None)
            if fused is not None and role in fused.roles:
                part = fused.roles.index(role)
                return tuple(
                    tensor.chunk(len(fused.roles), dim=fused.dim if tensor.dim() > 1 else 0)[part]
                    for tensor in _tensors(getattr(holder, fused.place))
                )
            if role == "down" and getattr(places, "down", None):
                return _tensors(getattr(holder, places.down))
        return ()

    def role_name(self, role: str) -> str:
        """What the family calls a projection."""
        holders = [places for places in (self.family.attention, self.family.mlp) if places is not None]
        names = [name for places in holders for name in places.projections.values()]
        for places in holders:
            if role in places.projections:
                name = places.projections[role]
                # GPT-2 calls the last projection of both by one name.
                return f"{places.place}.{name}" if names.count(name) > 1 else name
        return f"the part for {role}"

    def at(self, place: str | None, what: str, below: Any = None) -> Any:
        """The module at a place, by default below the model."""
        holder = self.model if below is None else below
        if place is None:
            raise UnsupportedModel(f"{self.family.name} shows no {what} under a name that is known here")
        try:
            return holder.get_submodule(place)
        except AttributeError as error:
            raise UnsupportedModel(
                f"{place} is not in this {type(holder).__name__}, where {self.family.name} is described to have its {what}"
            ) from error

    def _holders(self, layer: Any) -> Iterator[tuple[Any, Any]]:
        for places in (self.family.attention, self.family.experts, self.family.mlp):
            if places is None:
                continue
            try:
                yield layer.get_submodule(places.place), places
            except AttributeError:
                continue


def _tensors(part: Any) -> tuple[torch.Tensor, ...]:
    """Of a module, or a tensor itself."""
    if isinstance(part, torch.Tensor):
        return (part,)
    return tuple(tensor for name in ("weight", "bias") if (tensor := getattr(part, name, None)) is not None)
