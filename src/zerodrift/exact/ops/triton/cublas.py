"""Products of many rows by cuBLAS, whose bits are those of K in order as long as it may not split K.

On an H200 791 of 794 products of five models had the very bits of the Triton kernel beside this file (M = 1 to 8,192, hard
inputs); the three that had not were single rows. cuBLAS picks a kernel by the number of rows, so rows are rounded up to
sizes that can all be asked beforehand. Whether bits and shape agree is proven at start-up; nothing unproven is used.
Shapes: T rows, N outputs, K inputs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

LEAST_ROWS = 65
"""Below, cuBLAS without split-K falls off a cliff where K is deep (4096 × 12288, 16 rows: 328 µs against Triton's 43)."""
_SIZES = (*range(128, 1024, 64), *range(1024, 2048, 128), *range(2048, 8192, 512), 8192)
_MOST_OUTPUTS = 2**28
"""Numbers that one product may give, 1 GB in fp32: a head is asked, and used, with fewer rows than a projection."""


@cache
def row_counts(columns: int) -> tuple[int, ...]:
    """How many rows cuBLAS is called with for so many outputs. What lies between is padded, by 12 % at most from 512 on."""
    return tuple(size for size in _SIZES if size * columns <= _MOST_OUTPUTS) or _SIZES[:1]


def takes(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Enough rows, and both where memory begins: cuBLAS looks at that too, and was asked with such ones."""
    return len(x_TK) >= LEAST_ROWS and (x_TK.data_ptr() | weight_NK.data_ptr()) % 256 == 0


def linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x Wᵀ + b, rounded once, to `dtype`."""
    counts, rows = row_counts(len(weight_NK)), len(x_TK)
    whole = rows // counts[-1] * counts[-1]
    more = next(count for count in (0, *counts) if count >= rows - whole)
    straight = bias_N is None and dtype is x_TK.dtype
    out_TN = x_TK.new_empty(whole + more, len(weight_NK), dtype=dtype if straight else torch.float32)
    # Each where it belongs: put together afterwards, 16,384 rows took a third longer.
    for part_TK, part_TN in zip(x_TK.split(counts[-1]), out_TN.split(counts[-1]), strict=True):
        _product(part_TK, weight_NK, part_TN)
    out_TN = out_TN[:rows]
    if bias_N is not None:
        out_TN += bias_N.float()
    return out_TN.to(dtype)


def _product(x_TK: torch.Tensor, weight_NK: torch.Tensor, out_TN: torch.Tensor) -> None:
    if len(x_TK) < len(out_TN):
        x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, len(out_TN) - len(x_TK)))
    with without_split_k():
        if out_TN.dtype is x_TK.dtype:
            torch.mm(x_TK, weight_NK.T, out=out_TN)
        else:
            torch.mm(x_TK, weight_NK.T, out_dtype=out_TN.dtype, out=out_TN)


class _Setting:
    """cuBLASLt and K in one piece while anybody is inside; as it was before as soon as nobody is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: tuple[Any, tuple[bool, bool]] | None = None

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                matmul = torch.backends.cuda.matmul
                reduced = matmul.allow_bf16_reduced_precision_reduction
                split_k = matmul.allow_bf16_reduced_precision_reduction_split_k
                self._before = (torch.backends.cuda.preferred_blas_library(), (reduced, split_k))
                self._set("cublaslt", (False, False))
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                assert self._before is not None, "left before it was entered"
                self._set(*self._before)

    def _set(self, library: Any, allowed: tuple[bool, bool]) -> None:
        torch.backends.cuda.preferred_blas_library(library)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed


_setting = _Setting()


@contextmanager
def without_split_k() -> Iterator[None]:
    """For our own products only, since the settings are the process's; an engine and a trainer may be inside at once.

    May be entered again inside: a forward sets them once, because 200 times cost 5 ms of the host.
    """
    _setting.enter()
    try:
        yield
    finally:
        _setting.leave()
