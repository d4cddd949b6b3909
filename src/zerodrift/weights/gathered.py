"""All tensors of a model's checkpoint, whole, wherever their parts are."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class WholeState(NamedTuple):
    """What a checkpoint of the model would hold."""

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    """Names that share the memory of another, to that one."""


def whole_state(model: Any) -> WholeState:
    """Each tensor once. Those that FSDP2 shards are gathered: every rank of it calls this or `gather_along`, or all wait."""
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor, twin in _gathered(model):
        if twin is None:
            tensors[name] = tensor
        else:
            tied[name] = twin
    return WholeState(tensors, tied)


def gather_along(model: Any) -> None:
    """On a rank that has no use for the whole: each tensor is let go as soon as it is gathered."""
    for _ in _gathered(model):
        pass


@torch.no_grad()
def _gathered(model: Any) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Name, whole tensor, and the name whose memory it shares."""
    first: dict[object, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        sharded = hasattr(tensor, "full_tensor")
        local = tensor.to_local() if sharded else tensor
        # Empty tensors have no memory, and all of them would look tied to each other.
        place = (
            (local.data_ptr(), tuple(tensor.shape), local.dtype, local.stride()) if local.numel() else name
        )
        if place in first:
            yield name, local, first[place]
            continue
        first[place] = name
        yield name, (tensor.full_tensor() if sharded else tensor).detach(), None
