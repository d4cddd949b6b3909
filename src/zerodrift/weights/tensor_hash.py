"""The content of one tensor as a number: equal bits give equal hashes, whatever the device or the strides."""

import torch
import xxhash

from zerodrift.core.errors import InvalidValue


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
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)
