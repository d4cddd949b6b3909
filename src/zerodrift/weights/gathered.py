"""All tensors of a model's checkpoint, whole, wherever their parts are."""

from typing import Any, NamedTuple

import torch


class WholeState(NamedTuple):
    """What a checkpoint of the model would hold."""

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    """Names that share the memory of another, to that one."""


@torch.no_grad()
def whole_state(model: Any) -> WholeState:
    """Each tensor once. Those that FSDP2 shards are gathered: every rank of it calls this, or all of them wait."""
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        sharded = hasattr(tensor, "full_tensor")
        local = tensor.to_local() if sharded else tensor
        # Empty tensors have no memory, and all of them would look tied to each other.
        place = (
            (local.data_ptr(), tuple(tensor.shape), local.dtype, local.stride()) if local.numel() else name
        )
        if place in first:
            tied[name] = first[place]
            continue
        first[place] = name
        tensors[name] = (tensor.full_tensor() if sharded else tensor).detach()
    return WholeState(tensors, tied)
