"""One digest for a whole model, equal on every side that holds the same checkpoint."""

from collections.abc import Mapping

import torch

from zerodrift.weights.listing import manifest_of


def model_digest(model: torch.nn.Module) -> str:
    """sha256 over the model's checkpoint: equal to that of the files it was saved to, in the same dtype.

    Experts are the exception: transformers stacks them as it reads them, and the digest is of the stacks.
    """
    return manifest_of(checkpoint_state(model)).digest


def checkpoint_state(model: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, torch.Tensor]:
    """The state dict as it would be saved: of names that share one memory, only the first.

    With `keep_vars` the parameters themselves.
    """
    state: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=keep_vars)
    kept: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in state.items():
        # Empty tensors have no memory, and all of them would look tied to each other.
        address = tensor.data_ptr() if tensor.numel() else name
        place = (address, tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if place not in seen:
            kept[name] = tensor
        seen.add(place)
    return kept
