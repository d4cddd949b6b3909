"""The content of one tensor as a number: equal bits give equal hashes, whatever the device or the strides."""

from collections.abc import Iterator

import torch
import xxhash

from zerodrift.core.errors import InvalidValue

CHUNK_BYTES = 16 * 2**20
"""Copied at a time, where a copy is needed: from a GPU, or of elements that lie apart."""


def tensor_hash(name: str, tensor: torch.Tensor) -> str:
    """xxh3_128 of the elements in row-major order, as hex. `name` is for the message only.

    Hashes bits, not values: -0.0 differs from 0.0, and one NaN from another. It finds accidents, at 9.5 GB/s where
    sha256 does 1.3; against a forger the manifest's sha256 protects only what it covers, the hashes.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise InvalidValue(
            f"tensor {name!r} is {tensor.layout} on {tensor.device} and has no plain content to hash; "
            "load the weights, or densify the tensor"
        )
    hasher = xxhash.xxh3_128()
    for part in _chunks(tensor.detach()):
        hasher.update(part.numpy().data)
    return hasher.hexdigest()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Bytes in row-major order, on the CPU. Those of a contiguous CPU tensor are hashed where they are."""
    if not tensor.numel():
        return
    if not tensor.is_contiguous():
        rows = max(1, CHUNK_BYTES // (tensor[0].numel() * tensor.element_size()))
        for part in torch.split(tensor, rows):
            yield from _chunks(part.contiguous())
        return
    flat = tensor.reshape(-1).view(torch.uint8)
    if not tensor.is_cuda:
        yield flat.cpu()
        return
    # Page-locked, which a GPU writes to at full speed; torch keeps it for the next tensor.
    room = torch.empty(min(CHUNK_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True)
    for part in torch.split(flat, CHUNK_BYTES):
        yield room[: len(part)].copy_(part)
