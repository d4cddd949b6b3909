"""A safetensors file that is in memory already: where each tensor lies in it. Torch-free.

Read here, and not by the vendor's library, because that maps the file: who writes to it later changes tensors that were
verified before. Bytes in hand cannot change.
"""

import json
import math
from typing import Any, NamedTuple

from zerodrift.core.errors import TruncatedWeights
from zerodrift.weights.dtypes import BY_CODE, Dtype

MOST_HEADER_BYTES = 16 * 2**20
_LENGTH = 8


class Stored(NamedTuple):
    """One tensor of a file."""

    dtype: Dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def tensors_in(content: bytes | bytearray, where: str) -> dict[str, Stored]:
    """By name, in the order of the file; they cover it without gap or overlap."""
    length = int.from_bytes(content[:_LENGTH], "little")
    if len(content) < _LENGTH or not 2 <= length <= min(MOST_HEADER_BYTES, len(content) - _LENGTH):
        raise TruncatedWeights(
            f"{where} has {len(content)} bytes and a header of {length}; it was cut off, or is no safetensors file"
        )
    start = _LENGTH + length
    found = {
        name: _stored(name, entry, start, where)
        for name, entry in _header(bytes(content[_LENGTH:start]), where)
        if name != "__metadata__"
    }
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = start
    for name, stored in ordered.items():
        if stored.begin != position:
            raise TruncatedWeights(
                f"{where}: {name} begins at byte {stored.begin}, and {position} comes next"
            )
        position = stored.end
    if position != len(content):
        raise TruncatedWeights(f"{where} has {len(content)} bytes, and its header accounts for {position}")
    return ordered


def _header(text: bytes, where: str) -> list[tuple[str, Any]]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        # Of a name that stands twice, a dict would keep the last and a reader elsewhere the first.
        found: dict[str, Any] = {}
        for name, value in items:
            if name in found:
                raise TruncatedWeights(f"{where} names {name[:80]!r} twice in its header")
            found[name] = value
        return found

    try:
        header = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise TruncatedWeights(f"{where} has a header that is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise TruncatedWeights(f"{where} has a header that is a {type(header).__name__}, and no object")
    return list(header.items())


def _stored(name: str, entry: Any, start: int, where: str) -> Stored:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise TruncatedWeights(f"{where}: {name[:80]!r} has a header without dtype, shape or data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = BY_CODE.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise TruncatedWeights(f"{where}: {name[:80]} is of dtype {str(code)[:40]!r}, which is not known")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise TruncatedWeights(f"{where}: {name[:80]} has a shape or offsets that are no sizes")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.nbytes:
        raise TruncatedWeights(
            f"{where}: {name[:80]} has {end - begin} bytes, and {shape} of {dtype.name} needs "
            f"{math.prod(shape) * dtype.nbytes}"
        )
    return Stored(dtype, tuple(shape), start + begin, start + end)


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48 for value in values
    )
