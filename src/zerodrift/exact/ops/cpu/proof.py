"""Which variant of an op holds on this machine, found by trying, and remembered for the life of the process.

The answer depends on shape and thread count, so it is looked up at every call: a process that changes its number of
threads proves anew instead of trusting an old answer.
"""

from collections.abc import Callable

import torch

from zerodrift.exact import probe
from zerodrift.exact.ops.cpu import attention
from zerodrift.exact.ops.cpu.attention import BLOCK, Keys
from zerodrift.exact.ops.cpu.linear import ROW_FLOORS, linear

ATTENTION_FLOORS = (1, 2, 3, 4, 6, 8, 11, 12, 16)
"""Rows of a tile to round up to: AVX-512 needs 3 for heads of 64, 6 for 128 and 11 for 256."""
_linear_floors: dict[tuple[int, int, bool, int], int] = {}
_attention_floors: dict[tuple[int, int], int] = {}
_proven_rows: set[tuple[str, int, int]] = set()


def linear_floor(packed: torch.Tensor, bias_N: torch.Tensor | None) -> int:
    """Rows that a product needs."""
    outputs, inputs = packed.shape
    key = (outputs, inputs, bias_N is not None, torch.get_num_threads())
    if key not in _linear_floors:
        # 520 rows reach every blocking of M; a large head would take seconds, and gets 96.
        x = probe.hard(520 if outputs * inputs <= 2**21 else 96, inputs)
        _linear_floors[key] = probe.least_floor(
            ROW_FLOORS,
            lambda floor: lambda rows: linear(rows, packed, bias_N, floor),
            x,
            f"linear {inputs} -> {outputs}",
        )
    return _linear_floors[key]


def attention_floor(size: int) -> int:
    """Rows that a tile needs, for heads of `size`."""
    key = (size, torch.get_num_threads())
    if key not in _attention_floors:
        index = torch.arange(200, dtype=torch.float32)[:, None]
        _attention_floors[key] = probe.least_floor(
            ATTENTION_FLOORS, _attention_probe(size), index, f"attention over heads of {size}"
        )
    return _attention_floors[key]


def require_rows(name: str, op: probe.Rows, columns: int) -> None:
    """`op`, which has no variant, holds for rows of so many columns."""
    key = (name, columns, torch.get_num_threads())
    if key not in _proven_rows:
        with torch.no_grad():
            probe.require_rows(op, columns, f"{name} over {columns}")
        _proven_rows.add(key)


def _attention_probe(size: int) -> Callable[[int], probe.Rows]:
    """An op on row numbers: which of 200 fixed queries to compute together, with blocks that no row sees behind."""
    generator = torch.Generator().manual_seed(size)
    pairs, length = 3, 6 * BLOCK
    q = torch.randn(200, pairs, size, generator=generator) * (2 / size**0.5)
    k = torch.randn(pairs, length, size, generator=generator)
    v = probe.hard(pairs * length, size).view(pairs, length, size)

    def make(floor: int) -> probe.Rows:
        def op(index: torch.Tensor) -> torch.Tensor:
            row_of = index[:, 0].long()
            padded = torch.cat([row_of, row_of[:1].expand(max(0, floor - len(row_of)))])
            positions = (padded * 37) % (3 * BLOCK)
            keys = (int(positions.max()) // BLOCK + 1 + len(row_of) % 3) * BLOCK
            out: torch.Tensor = q.new_empty(pairs, len(padded), size)
            attention.attend_rows(
                q[padded].transpose(0, 1).contiguous(),
                Keys(k[:, :keys], v[:, :keys], 0),
                attention.hidden_keys(positions, 0, keys, None),
                (pairs, -1, keys),
                out,
            )
            return out[:, : len(row_of)].transpose(0, 1)

        return op

    return make
