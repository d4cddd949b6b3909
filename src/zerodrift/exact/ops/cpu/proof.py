"""With how many rows an op holds on this machine: asked of each shape and number of threads when it first occurs.

Small products take other paths in BLAS than large ones, and MKL's threads cut one matrix into rows where they share
out several whole: on AVX-512 with two threads a single pair changes rows for M < 12 unless M is a multiple of 4, two
pairs only for M < 4. So no shape vouches for another. A call is made with rows of zeros added until it holds, or
it is not made. Answers are remembered for the life of the process; one costs about as much as the call it allows,
and all layers share it.
"""

import copy
from collections.abc import Callable
from threading import RLock

import torch
from torch.utils.weak import WeakIdKeyDictionary

from zerodrift.exact import probe
from zerodrift.exact.ops.cpu import blocks
from zerodrift.exact.ops.cpu.blocks import BLOCK
from zerodrift.exact.ops.cpu.linear import linear
from zerodrift.exact.ops.interface import RowOps

MULTIPLES = (2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Of which the number of rows is made a multiple, where as many as are asked for do not hold."""
EXACT_UP_TO = 8
"""Rows of attention are always made a multiple of this beyond it: fewer shapes to ask about."""
ALIGNMENT = 16
"""Numbers in 64 bytes, a vector of AVX-512: where a matrix begins may matter to MKL, within this."""
Key = tuple[object, ...]
_proven: dict[Key, int] = {}
_linears = WeakIdKeyDictionary()
"""For a packed weight: its bias when it was first asked about, and what must come out."""
_attention: dict[int, "AttentionSample"] = {}
_rows: dict[tuple[str, int], probe.Reference] = {}
_lock = RLock()


def linear_rows(packed: torch.Tensor, bias_N: torch.Tensor | None, count: int) -> int:
    """Rows with which a product of `count` holds."""
    outputs, inputs = packed.shape
    key = ("linear", outputs, inputs, bias_N is not None, count, torch.get_num_threads())
    return _proven[key] if key in _proven else _least(key, count, _linear_holds(packed, bias_N))


def attention_rows(q_ZMD: torch.Tensor, k_ZLD: torch.Tensor, v_ZLD: torch.Tensor) -> int:
    """Rows with which attention of so many pairs and keys holds."""
    pairs, count, size = q_ZMD.shape
    places = (_place(k_ZLD), _place(v_ZLD))
    key = ("attention", pairs, count, size, k_ZLD.shape[1], places, torch.get_num_threads())
    if key in _proven:
        return _proven[key]

    def holds(rows: int) -> bool:
        sample = _attention.get(size) or _attention.setdefault(size, AttentionSample(size))
        return sample.holds((pairs, rows, k_ZLD.shape[1]), places)

    return _least(key, count if count <= EXACT_UP_TO else -(-count // 8) * 8, holds)


def prove_attention(size: int) -> None:
    """Heads of `size`, for one row and for many, one pair and several, one block and several."""
    for pairs in (1, 2, 3):
        for count in (1, 2, 64):
            for length in (BLOCK, 6 * BLOCK):
                k_ZLD = torch.empty(pairs, length, size)
                attention_rows(torch.empty(pairs, count, size), k_ZLD, torch.empty_like(k_ZLD))


def require_rows(name: str, op: probe.Rows, columns: int, count: int) -> None:
    """`op`, which belongs to no model and works on rows of so many columns, holds for `count` of them; or `Unproven`."""
    key = ("rows", name, columns, count, torch.get_num_threads())
    if key in _proven:
        return
    with _lock, torch.no_grad():
        if (name, columns) not in _rows:
            _rows[name, columns] = probe.reference(op, probe.hard(probe.SAMPLE, columns))
        if not probe.holds(op, _rows[name, columns], count):
            raise probe.unproven(f"{name} over {columns}", f"when {count} of them are computed together")
        _proven[key] = count


class RowProofs:
    """Of a model's ops that work on rows and have no variant."""

    def __init__(self, row_ops: RowOps) -> None:
        self._ops: dict[int, list[tuple[str, probe.Rows]]] = {}
        for name, (op, columns, _) in row_ops.items():
            # A copy: the weights of the model's own norms may be trained while their bits are remembered here.
            self._ops.setdefault(columns, []).append((name, copy.deepcopy(op)))
        self._references: dict[tuple[str, int], probe.Reference] = {}
        self._proven: set[tuple[int, int, int]] = set()

    @property
    def columns(self) -> frozenset[int]:
        """How wide the rows are."""
        return frozenset(self._ops)

    def require(self, columns: int, count: int) -> None:
        """What works on rows of so many columns holds for `count` of them; or `Unproven`."""
        if columns not in self._ops or (columns, count, torch.get_num_threads()) in self._proven:
            return
        with _lock, torch.no_grad():
            for name, op in self._ops[columns]:
                key = (name, columns)
                if key not in self._references:
                    self._references[key] = probe.reference(op, probe.hard(probe.SAMPLE, columns))
                if not probe.holds(op, self._references[key], count):
                    raise probe.unproven(
                        f"{name} over {columns}", f"when {count} of them are computed together"
                    )
            self._proven.add((columns, count, torch.get_num_threads()))


def _least(key: Key, count: int, holds: Callable[[int], bool]) -> int:
    with _lock, torch.no_grad():
        tried = sorted({count, *(-(-count // multiple) * multiple for multiple in MULTIPLES)})
        found = next((rows for rows in tried if holds(rows)), None)
        if found is None:
            raise probe.unproven(
                f"{key[0]} of shape {key[1:-1]}", f"with their number, even when padded to {tried[-1]}"
            )
        _proven[key] = found
    return found


def _linear_holds(packed: torch.Tensor, bias_N: torch.Tensor | None) -> Callable[[int], bool]:
    def op(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, packed, bias_N, len(rows))

    def holds(rows: int) -> bool:
        nonlocal bias_N
        if packed not in _linears:
            # The bias may be trained while the packed weight stays.
            bias_N = None if bias_N is None else bias_N.clone()
            _linears[packed] = bias_N, probe.reference(op, probe.hard(probe.SAMPLE, packed.shape[1]))
        bias_N, known = _linears[packed]
        return probe.holds(op, known, rows)

    return holds


def _place(part_ZLD: torch.Tensor) -> tuple[int, int]:
    """Where a matrix begins, and each next one, within the alignment."""
    return part_ZLD.data_ptr() // 4 % ALIGNMENT, part_ZLD.stride(0) % ALIGNMENT


class AttentionSample:
    """Queries, keys, scores and values to fill attention of any shape with, and what each must give.

    Q queries (and rows of scores), N blocks of keys (and of values).
    """

    def __init__(self, size: int) -> None:
        self.size, keys = size, 5 * BLOCK
        self.q_QD = probe.hard(probe.SAMPLE, size)
        self.k_NkD = probe.hard(keys, size, 1).view(-1, BLOCK, size)
        self.v_NkD = probe.hard(keys, size, 2).view(-1, BLOCK, size)
        generator = torch.Generator().manual_seed(size)
        # Weights of e⁰ to e⁻¹⁶, and keys out of sight.
        self.scores_Qk = torch.rand(probe.SAMPLE, BLOCK, generator=generator) * -16
        self.scores_Qk[torch.rand(probe.SAMPLE, BLOCK, generator=generator) < 0.1] = -torch.inf
        rows_M = torch.arange(probe.AMONG) % probe.SAMPLE
        with probe.threads(1):
            scores_ML = blocks.scores(self.q_QD[rows_M][None], self.k_NkD.view(1, keys, size))[0]
            same_ML = self.scores_Qk[rows_M].repeat(1, keys // BLOCK)
            ((parts, sums),) = blocks.sums_by_block(
                same_ML[None], torch.zeros(1, probe.AMONG), self.v_NkD.view(1, keys, size)
            )
        self.scores_QNk = scores_ML[: probe.SAMPLE].view(probe.SAMPLE, -1, BLOCK)
        self.parts_QND = parts[0, :, : probe.SAMPLE].transpose(0, 1).contiguous()
        self.sums_Q1 = sums[0, 0, : probe.SAMPLE]

    def holds(self, shape: tuple[int, int, int], places: tuple[tuple[int, int], ...]) -> bool:
        """Whether pairs, rows and keys of `shape`, lying in memory so, give each row its bits."""
        pairs, rows, length = shape
        z_Z, m_M, b_B = torch.arange(pairs), torch.arange(rows), torch.arange(length // BLOCK)
        blocks_ZB = (z_Z[:, None] + b_B) % len(self.k_NkD)
        row_ZM = (3 * z_Z[:, None] + m_M) % probe.SAMPLE
        k_ZLD = _lying(self.k_NkD[blocks_ZB].view(pairs, length, self.size), places[0])
        expected = self.scores_QNk[row_ZM[:, :, None], blocks_ZB[:, None]]
        if not probe.same_bits(blocks.scores(self.q_QD[row_ZM], k_ZLD), expected.view(shape)):
            return False
        row_ZMB = (row_ZM[:, :, None] + 5 * b_B) % probe.SAMPLE
        v_ZLD = _lying(self.v_NkD[blocks_ZB].view(pairs, length, self.size), places[1])
        return self._sums_hold(self.scores_Qk[row_ZMB].view(shape), row_ZMB, blocks_ZB, v_ZLD)

    def _sums_hold(
        self, scores_ZML: torch.Tensor, row_ZMB: torch.Tensor, blocks_ZB: torch.Tensor, v_ZLD: torch.Tensor
    ) -> bool:
        begin = 0
        for parts_ZBMD, sums_ZBM1 in blocks.sums_by_block(
            scores_ZML, scores_ZML.new_zeros(row_ZMB.shape[:2]), v_ZLD
        ):
            inside = slice(begin, begin + parts_ZBMD.shape[1])
            row_ZBM = row_ZMB[:, :, inside].transpose(1, 2)
            if not (
                probe.same_bits(parts_ZBMD, self.parts_QND[row_ZBM, blocks_ZB[:, inside, None]])
                and probe.same_bits(sums_ZBM1, self.sums_Q1[row_ZBM])
            ):
                return False
            begin = inside.stop
        return True


def _lying(part_ZLD: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
    """A copy that begins at such a place, as each of its matrices does."""
    pairs, length, size = part_ZLD.shape
    offset, beyond = place
    stride = length * size + beyond
    room = part_ZLD.new_empty(offset + pairs * stride)
    copied = room[offset:].as_strided(part_ZLD.shape, (stride, size, 1))
    return copied.copy_(part_ZLD)
