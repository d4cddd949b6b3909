"""Is a safetensors file whole? Answered from its header and its size, before any tensor is read.

Layout: 8 bytes little-endian header length, JSON header, then the data; tensors cover the data without gap or
overlap. This proves shape, not content: a flipped bit passes here and is found by the manifest in `weights`.
"""

import math
from pathlib import Path
from typing import NoReturn

import msgspec

from zerodrift.core.errors import TruncatedWeights

# The reference reader's own limit is 100 MB; a 1-trillion-parameter shard's header stays under 1 MB.
MAX_HEADER_BYTES = 16 * 2**20

BITS_PER_ELEMENT = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class TensorEntry(msgspec.Struct, frozen=True):
    """Where one tensor lies in the data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_file(path: Path) -> dict[str, TensorEntry]:
    """Tensor entries by name, once they are known to cover the file exactly."""
    size = path.stat().st_size
    header = _read_header(path, size)
    entries = _decode(path, header)
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        _check_entry(path, name, entry)
        start, end = entry.data_offsets
        if start != position:
            _refuse(
                path, f"tensor {name!r} starts at byte {start} of the data, the one before ends at {position}"
            )
        position = end
    described = 8 + len(header) + position
    if described != size:
        _refuse(path, f"the header describes {described} bytes and the file has {size}")
    return entries


def _read_header(path: Path, size: int) -> bytes:
    if size < 8:
        _refuse(path, f"it has {size} bytes, and the header length alone takes 8")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            _refuse(
                path,
                f"its header claims {length} bytes in a file of {size}, where at most {MAX_HEADER_BYTES} are accepted",
            )
        return file.read(length)


def _decode(path: Path, header: bytes) -> dict[str, TensorEntry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TruncatedWeights(
            f"{path} is damaged: its header of {len(header)} bytes cannot be read ({error}); "
            "copy or download it again"
        ) from error


def _check_entry(path: Path, name: str, entry: TensorEntry) -> None:
    start, end = entry.data_offsets
    if entry.dtype not in BITS_PER_ELEMENT:
        _refuse(path, f"tensor {name!r} has dtype {entry.dtype!r}, which safetensors does not define")
    if min(entry.shape, default=0) < 0 or start < 0:
        _refuse(
            path, f"tensor {name!r} has shape {entry.shape} at {entry.data_offsets}; neither can be negative"
        )
    bits = math.prod(entry.shape) * BITS_PER_ELEMENT[entry.dtype]
    if bits != 8 * (end - start):
        _refuse(
            path,
            f"tensor {name!r}, {entry.dtype} of shape {entry.shape}, takes {bits // 8} bytes and has {end - start}",
        )


def _refuse(path: Path, what: str) -> NoReturn:
    raise TruncatedWeights(f"{path} is damaged: {what}; copy or download it again")
