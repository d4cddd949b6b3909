"""Rotary parameters of a configuration: one set for all layers, or one for each type of layer (Gemma 3). Torch-free."""

from collections.abc import Mapping
from typing import Any


def rope_types(config: Any) -> dict[str, str]:
    """Kind of frequencies by type of layer; "" where all layers share them."""
    return {kind: each["rope_type"] for kind, each in _by_layer_type(config).items()}


def rope_bases(config: Any) -> dict[str, float]:
    """Base of the frequencies by type of layer; "" where all layers share it, and nothing where there is none."""
    written = _by_layer_type(config)
    return {kind: float(each["rope_theta"]) for kind, each in written.items() if "rope_theta" in each}


def with_rope_bases(config: Any, bases: Mapping[str, float]) -> dict[str, Any]:
    """`config.rope_parameters` with other bases."""
    changed = {
        kind: {**each, "rope_theta": bases[kind]} if kind in bases else each
        for kind, each in _by_layer_type(config).items()
    }
    return changed.get("", changed)


def longest_context(config: Any) -> int:
    """Positions that the frequencies are made for: those of yarn and linear reach `factor` times as far."""
    trained = int(config.max_position_embeddings)
    reach = {
        "yarn": lambda each: each.get("original_max_position_embeddings", trained) * each["factor"],
        "linear": lambda each: trained * each["factor"],
    }
    stretched = [
        int(reach[each["rope_type"]](each))
        for each in _by_layer_type(config).values()
        if each["rope_type"] in reach
    ]
    return max(trained, *stretched, 0)


def _by_layer_type(config: Any) -> dict[str, dict[str, Any]]:
    written = getattr(config, "rope_parameters", None) or {}
    if written and not all(each is None or isinstance(each, dict) for each in written.values()):
        return {"": written}
    return {kind: each for kind, each in written.items() if each is not None}
