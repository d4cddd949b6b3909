"""Gradients of the parts of a batch, summed over rollouts: which tokens a part has, and how two sums compare."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from zerodrift.records.gradient import GradientPart
from zerodrift.stats.arrays import Bools, Floats, Ids

POSITIONS = (1, 16, 256)
"""First position of the later parts; the first token alone comes out of the prefill."""
POSITION_LABELS = ("first", "1-15", "16-255", "256-")
LOG_P = (-0.1, -0.7, -2.3)
LOG_P_LABELS = ("p>0.9", "p>0.5", "p>0.1", "rarer")
_CHUNK = 2**22
"""Elements that are widened to float64 at once."""


class Cell(NamedTuple):
    """One part of the tokens."""

    kind: str
    label: str


ALL = Cell("all", "all")


class Pair(NamedTuple):
    """One gradient by either set of numbers."""

    engine: torch.Tensor
    true: torch.Tensor


def cells_of(places: Ids, policy: Floats, *, by_part: bool) -> Iterator[tuple[Cell, Bools]]:
    """Which tokens of a rollout are in which part; parts that are empty are left out. Parts of a kind add up to the whole."""
    if not by_part:
        yield ALL, np.ones(len(places), dtype=np.bool_)
        return
    position = np.searchsorted(POSITIONS, places, side="right")
    rarity = np.sum([policy < edge for edge in LOG_P], axis=0, dtype=np.int64)
    for kind, labels, code in (("position", POSITION_LABELS, position), ("log p", LOG_P_LABELS, rarity)):
        for place, label in enumerate(labels):
            if (chosen := code == place).any():
                yield Cell(kind, label), chosen


class PartSums:
    """Gradients and counts by part. Positions cover every token once, so the whole is their sum."""

    def __init__(self, size: int, *, by_part: bool) -> None:
        """`size` is the number of parameters."""
        self.by_part = by_part
        self._size = size
        self._pairs: dict[Cell, Pair] = {}
        self._counts: dict[Cell, tuple[int, float, int]] = {}
        self._group: torch.Tensor | None = None
        self._squares = 0.0
        """Σ over groups of the squared length of their true gradient."""

    @property
    def cells(self) -> list[Cell]:
        """In the order of their labels, the whole first."""
        order = [
            ALL,
            *(Cell("position", label) for label in POSITION_LABELS),
            *(Cell("log p", label) for label in LOG_P_LABELS),
        ]
        return [cell for cell in order if cell in self._counts]

    def count(self, cell: Cell, tokens: int, gap: float, changed: int) -> None:
        """Tokens of a part, whether they have an advantage or not."""
        for each in self._with_whole(cell):
            before = self._counts.get(each, (0, 0.0, 0))
            self._counts[each] = (before[0] + tokens, before[1] + gap, before[2] + changed)

    def add(self, cell: Cell, pair: Pair) -> None:
        """What one rollout adds."""
        for each in self._with_whole(cell):
            if each not in self._pairs:
                self._pairs[each] = Pair(torch.zeros(self._size), torch.zeros(self._size))
            both = self._pairs[each]
            both.engine.add_(pair.engine.cpu())
            both.true.add_(pair.true.cpu())
            if each == ALL:
                self._group = pair.true.cpu() + (0 if self._group is None else self._group)

    def end_group(self) -> None:
        """The rollouts of one prompt are all there."""
        if self._group is not None:
            self._squares += _dot(self._group, self._group)
            self._group = None

    @staticmethod
    def _with_whole(cell: Cell) -> tuple[Cell, ...]:
        return (cell, ALL) if cell.kind == "position" else (cell,)

    def part(self, cell: Cell) -> GradientPart:
        """What is said of one."""
        tokens, gap, changed = self._counts[cell]
        cosine: float | None = None
        ratio: float | None = None
        if cell in self._pairs:
            engine, true = self._pairs[cell]
            lengths = math.sqrt(_dot(engine, engine)), math.sqrt(_dot(true, true))
            if all(lengths):
                cosine, ratio = _dot(engine, true) / (lengths[0] * lengths[1]), lengths[0] / lengths[1]
        return GradientPart(
            kind=cell.kind,
            label=cell.label,
            tokens=tokens,
            mean_abs=gap / tokens,
            clip_changed=changed / tokens,
            cosine=cosine,
            norm_ratio=ratio,
        )

    def error(self) -> float | None:
        """|difference| over |true|."""
        engine, true = self._pairs[ALL]
        length = _dot(true, true)
        difference = engine - true
        return math.sqrt(_dot(difference, difference) / length) if length else None

    def noise(self, groups: int) -> float | None:
        """Standard error of the true gradient over its length, from the spread of the groups."""
        true = self._pairs[ALL].true
        length = _dot(true, true)
        if groups < 2 or not length:
            return None
        spread = groups / (groups - 1) * (self._squares - length / groups)
        return math.sqrt(max(0.0, spread) / length)


def _dot(first: torch.Tensor, second: torch.Tensor) -> float:
    """In float64, without a copy of the whole."""
    return math.fsum(
        float(first[begin : begin + _CHUNK].double() @ second[begin : begin + _CHUNK].double())
        for begin in range(0, len(first), _CHUNK)
    )
