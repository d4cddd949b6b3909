"""Tensors that an update path treats alike, by name. Torch-free."""

from collections.abc import Callable

from zerodrift.models.family.base import Family

Grouping = Callable[[Family, str], str]
"""Tensor name to the name of its group, in a family of models."""


def by_layer(family: Family, name: str) -> str:
    """`layer 3`, or the last module that owns a tensor outside the layers."""
    if (layer := family.layer_of(name)) is not None:
        return f"layer {layer}"
    return _owner(name)


def by_role(family: Family, name: str) -> str:
    """What a tensor does, in whichever layer: `norms`, or the name of its projection."""
    return "norms" if family.is_norm(name) else _owner(name)


def by_kind(family: Family, name: str) -> str:
    """`biases`, `norms` or `matrices`: what buckets, adapters and quantised loaders treat differently."""
    return "biases" if name.endswith(".bias") else "norms" if family.is_norm(name) else "matrices"


GROUPINGS: tuple[Grouping, ...] = (by_layer, by_role, by_kind)
"""What an update path forgets, it forgets by layer, by projection, or by kind of tensor."""


def _owner(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias").rsplit(".", maxsplit=1)[-1]
