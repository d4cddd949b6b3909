"""What a set of weights consists of, so that two sides can tell whether they hold the same one.

Safetensors notices a truncated file and nothing else: a flipped bit, a zeroed page or two swapped layers load in
silence. A manifest names each of them. It is in checkpoint space: the names and dtypes of the files, each tied
tensor once.
"""

import hashlib
from collections.abc import Mapping

import msgspec
import torch

from zerodrift.core.errors import InvalidValue
from zerodrift.core.frozen import freeze
from zerodrift.weights.tensor_hash import tensor_hash


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: what it is called, how it is shaped, and which bits it holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it, without the prefix: `float32`, `bfloat16`."""
    xxh3_128: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorRecord":
        """The record of a tensor in hand."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), dtype, tensor_hash(name, tensor))

    def difference(self, other: "TensorRecord") -> str:
        """What differs from `other`, in words; empty where nothing does."""
        if self.shape != other.shape:
            return f"shape {list(self.shape)} became {list(other.shape)}"
        if self.dtype != other.dtype:
            return f"dtype {self.dtype} became {other.dtype}"
        return "" if self.xxh3_128 == other.xxh3_128 else "content"


class ManifestDiff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How another set of weights differs from this one; false where it does not."""

    missing: tuple[str, ...]
    """Tensors that the other lacks."""
    extra: tuple[str, ...]
    """Tensors that only the other has."""
    changed: Mapping[str, str]
    """Name to what changed: `content`, or the shape or dtype with both values."""

    def __post_init__(self) -> None:
        """What was found stays found."""
        freeze(self, "changed")

    def __bool__(self) -> bool:
        """Whether there is any difference."""
        return bool(self.missing or self.extra or self.changed)

    def __str__(self) -> str:
        """One line per kind of difference, naming every tensor."""
        parts = [
            f"{kind}: {', '.join(names)}"
            for kind, names in (("missing", self.missing), ("extra", self.extra))
            if names
        ]
        if self.changed:
            parts.append("changed: " + ", ".join(f"{name} ({what})" for name, what in self.changed.items()))
        return "; ".join(parts) or "no difference"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every tensor of one set of weights, sorted by name."""

    tensors: tuple[TensorRecord, ...]
    buffers: tuple[TensorRecord, ...] = ()
    """Tensors that the model keeps beside its checkpoint, such as rotary frequencies."""

    def __post_init__(self) -> None:
        """Names are unique and sorted, so that equal weights have equal digests."""
        for records in (self.tensors, self.buffers):
            names = [record.name for record in records]
            if names != sorted(set(names)):
                raise InvalidValue(
                    "a manifest lists each tensor once, sorted by name; build it with Manifest.of"
                )

    @classmethod
    def of(
        cls, state: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor] | None = None
    ) -> "Manifest":
        """The manifest of tensors in hand, on any device."""
        return cls(_records(state), _records(buffers or {}))

    @property
    def digest(self) -> str:
        """sha256 over names, shapes, dtypes and content of everything listed."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def diff(self, other: "Manifest") -> ManifestDiff:
        """What changes on the way from this manifest to `other`."""
        before = {record.name: record for record in (*self.tensors, *self.buffers)}
        after = {record.name: record for record in (*other.tensors, *other.buffers)}
        changes = {name: before[name].difference(after[name]) for name in before if name in after}
        return ManifestDiff(
            missing=tuple(name for name in before if name not in after),
            extra=tuple(name for name in after if name not in before),
            changed={name: what for name, what in changes.items() if what},
        )


def _records(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorRecord, ...]:
    return tuple(TensorRecord.of(name, tensors[name]) for name in sorted(tensors))
