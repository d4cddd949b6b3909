"""Which piece of each tensor one rank of tensor parallelism holds, as vLLM and SGLang cut them (Megatron's way)."""

from typing import Any, NamedTuple

import torch

from zerodrift.models.family.registry import family_of

_ROWS, _COLUMNS = ("q", "k", "v", "gate", "up"), ("o", "down")
VOCABULARY = 64
"""Vocabularies are cut as if they had a multiple of so many rows."""


class TensorCut(NamedTuple):
    """How a tensor is cut among ranks."""

    dim: int
    multiple: int = 1


def cuts(model: Any) -> dict[str, TensorCut]:
    """By name, of the tensors that are known to be cut: norms and whatever else every rank has are left out."""
    family = family_of(model)
    projections = {
        f"{places.place}.{name}": role
        for places in (family.attention, family.mlp)
        if places is not None
        for role, name in places.projections.items()
    }
    vocabulary = {family.below_decoder(family.embedding), family.head}
    found = {}
    for name, tensor in model.state_dict().items():
        module = name.rpartition(".")[0]
        role = next((role for place, role in projections.items() if module.endswith(f".{place}")), None)
        if module in vocabulary:
            found[name] = TensorCut(0, VOCABULARY)
        elif role in _ROWS:
            found[name] = TensorCut(0)
        elif role in _COLUMNS and tensor.dim() > 1:
            found[name] = TensorCut(1)
    return found


def shard(tensor: torch.Tensor, cut: TensorCut, rank: int, ranks: int) -> torch.Tensor:
    """The piece of `rank`, as a view; empty where nothing is left for it."""
    size = tensor.shape[cut.dim]
    padded = -(-size // cut.multiple) * cut.multiple
    each = -(-padded // ranks)
    begin = min(rank * each, size)
    return tensor.narrow(cut.dim, begin, min(each, size - begin))
