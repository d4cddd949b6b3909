"""What a model in hand would send: the manifest of an update, with its ties and the buffers beside its checkpoint."""

import torch

from zerodrift.core.version import WeightVersion
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.manifest import Manifest
from zerodrift.weights.update import UpdateManifest


def update_of(model: torch.nn.Module, version: str, parent: WeightVersion | None = None) -> UpdateManifest:
    """The manifest of the weights that `model` has now; its tensors are `checkpoint_state(model)`."""
    return UpdateManifest(version=version, parent=parent, weights=whole_manifest(model), tied=ties_of(model))


def whole_manifest(model: torch.nn.Module) -> Manifest:
    """Checkpoint, and buffers beside it."""
    return manifest_of(checkpoint_state(model), beside_checkpoint(model))


def ties_of(model: torch.nn.Module) -> dict[str, str]:
    """Names of the state dict that share the memory of another, to that one."""
    kept = checkpoint_state(model)
    names = {tensor.data_ptr(): name for name, tensor in kept.items() if tensor.numel()}
    return {name: names[tensor.data_ptr()] for name, tensor in model.state_dict().items() if name not in kept}


def beside_checkpoint(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint does not have, as rotary frequencies."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}
