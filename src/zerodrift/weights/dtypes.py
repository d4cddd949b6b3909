"""The element types that weights come in: what torch calls them, what safetensors does, and how wide they are. Torch-free."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Dtype(NamedTuple):
    """One element type."""

    name: str
    """As torch writes it, without the prefix."""
    code: str
    """As a safetensors header writes it; empty where that has none."""
    nbytes: int


_ALL = (
    Dtype("float64", "F64", 8),
    Dtype("float32", "F32", 4),
    Dtype("bfloat16", "BF16", 2),
    Dtype("float16", "F16", 2),
    Dtype("float8_e4m3fn", "F8_E4M3", 1),
    Dtype("float8_e5m2", "F8_E5M2", 1),
    Dtype("int64", "I64", 8),
    Dtype("int32", "I32", 4),
    Dtype("int16", "I16", 2),
    Dtype("int8", "I8", 1),
    Dtype("uint8", "U8", 1),
    Dtype("bool", "BOOL", 1),
    Dtype("complex64", "", 8),
)
BY_NAME: Mapping[str, Dtype] = MappingProxyType({each.name: each for each in _ALL})
BY_CODE: Mapping[str, Dtype] = MappingProxyType({each.code: each for each in _ALL if each.code})
