"""One digest for a whole model, equal on every side that holds the same checkpoint."""

from collections.abc import Mapping

import torch

from zerodrift.weights.listing import manifest_of, record_of
from zerodrift.weights.manifest import Manifest


def model_digest(model: torch.nn.Module, dtype: torch.dtype | None = None) -> str:
    """sha256 over the model's checkpoint: equal to that of the files it was saved to, in the same dtype.

    With `dtype` as if it were loaded in that, one tensor at a time; a checkpoint of bf16 and its copy in fp32 have the
    same values and other bits.

    Experts are the exception: transformers stacks them as it reads them, and the digest is of the stacks.
    """
    state = checkpoint_state(model)
    if dtype is None:
        return manifest_of(state).digest
    return Manifest(tuple(record_of(name, _in(state[name], dtype)) for name in sorted(state))).digest


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


def fits(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether every value of the checkpoint can be held in `dtype`: widened, or narrow to begin with."""
    state = checkpoint_state(model)
    return all(torch.equal(_in(tensor, dtype).to(tensor.dtype), tensor) for tensor in state.values())


def _in(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
