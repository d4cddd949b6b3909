"""What a set of weights consists of, so that two sides can tell whether they hold the same one.

Safetensors notices a truncated file and nothing else: a flipped bit, a zeroed page or two swapped layers load in
silence. A manifest names each of them. It is in checkpoint space: the names and dtypes of the files, each tied
tensor once. It may come from anybody, so what no model can have is refused before anything is allocated. Torch-free:
`weights.listing` makes one of tensors in hand.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from itertools import pairwise

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import InvalidValue
from zerodrift.core.frozen import freeze
from zerodrift.weights.dtypes import BY_NAME

MOST_TENSORS = 2**20
MOST_BYTES = 2**42
"""4 TiB in one tensor, more than any model has; a shape above it is a mistake or an attack."""
_MOST_DIMENSIONS = 8
_NAME = re.compile(r"[\w.\-/:+]{1,512}", re.ASCII)
_XXH3_128 = re.compile(r"[0-9a-f]{32}")


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: what it is called, how it is shaped, and which bits it holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it, without the prefix: `float32`, `bfloat16`."""
    xxh3_128: str

    def __post_init__(self) -> None:
        """A tensor that could exist, under a name that can be printed."""
        require.instance(InvalidValue, "a tensor's name", self.name, str)
        if not _NAME.fullmatch(self.name):
            raise InvalidValue(
                f"a tensor is called {self.name[:80]!r}; names are 1 to 512 letters, digits and . _ - / : +"
            )
        if not isinstance(self.dtype, str) or self.dtype not in BY_NAME:
            raise InvalidValue(
                f"{self.name} is of dtype {str(self.dtype)[:40]!r}; use one of {', '.join(BY_NAME)}"
            )
        _check_shape(self.name, self.shape)
        if self.nbytes > MOST_BYTES:
            raise InvalidValue(f"{self.name} has {self.nbytes} bytes; more than {MOST_BYTES} is no tensor")
        if not isinstance(self.xxh3_128, str) or not _XXH3_128.fullmatch(self.xxh3_128):
            raise InvalidValue(f"{self.name} has xxh3_128 {str(self.xxh3_128)[:40]!r}; it is 32 hex digits")

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * BY_NAME[self.dtype].nbytes

    @property
    def form(self) -> str:
        """Shape and dtype, for a message."""
        return f"{list(self.shape)} of {self.dtype}"

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
            require.each(InvalidValue, "tensors", records, TensorRecord)
            if len(records) > MOST_TENSORS:
                raise InvalidValue(f"a manifest lists {len(records)} tensors; {MOST_TENSORS} at most")
            _check_order([record.name for record in records])
        if both := {record.name for record in self.tensors} & {record.name for record in self.buffers}:
            raise InvalidValue(f"a manifest lists {min(both)} as a tensor and as a buffer; it is one of them")

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


def _check_order(names: list[str]) -> None:
    for before, name in pairwise(names):
        if name == before:
            raise InvalidValue(f"a manifest lists {name} twice; which of the two is meant nobody can tell")
        if name < before:
            raise InvalidValue(f"a manifest lists {name} behind {before}; it is sorted by name")


def _check_shape(name: str, shape: object) -> None:
    for size in require.a_tuple(InvalidValue, f"the shape of {name}", shape):
        require.whole(InvalidValue, f"a dimension of {name}", size, "it counts elements", 0, MOST_BYTES)
    if isinstance(shape, tuple) and len(shape) > _MOST_DIMENSIONS:
        raise InvalidValue(f"{name} has {len(shape)} dimensions; no model has more than {_MOST_DIMENSIONS}")
