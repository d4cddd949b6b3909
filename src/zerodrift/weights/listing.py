"""Manifests of tensors in hand, on any device."""

from collections.abc import Mapping

import torch

from zerodrift.weights.manifest import Manifest, TensorRecord
from zerodrift.weights.tensor_hash import tensor_hash


def record_of(name: str, tensor: torch.Tensor) -> TensorRecord:
    """Name, shape, dtype and bits of one tensor."""
    return TensorRecord(name, tuple(tensor.shape), dtype_name(tensor.dtype), tensor_hash(name, tensor))


def manifest_of(
    state: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor] | None = None
) -> Manifest:
    """Of a state dict in which every tied tensor stands once, and of buffers that no checkpoint has."""
    return Manifest(_records(state), _records(buffers or {}))


def dtype_name(dtype: torch.dtype) -> str:
    """As manifests write it: `float32`, `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _records(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorRecord, ...]:
    return tuple(record_of(name, tensors[name]) for name in sorted(tensors))
