"""What of an update may have stayed away, by name: all of it, layers, modules, kinds, tensors, and halves of tensors. Torch-free."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zerodrift.audit.update.groups import GROUPINGS, Grouping
from zerodrift.models.family.base import Family
from zerodrift.stats.arrays import Floats

Slopes = Mapping[str, Floats]
"""By tensor, [N, R]: the derivative of each token's logprob by the share of each row's update."""
WHOLE = "the update"
PIECES = (2, 4)
"""Tensors are cut into so many pieces of rows; where it really begins and ends is searched afterwards."""


class Part(NamedTuple):
    """Some tensors, or some rows of one."""

    label: str
    tensors: tuple[str, ...]
    rows: tuple[int, int] | None = None
    """The first, and the one behind the last; None: all."""

    def column(self, slopes: Slopes) -> Floats:
        """What one more update of this part would add to each logprob."""
        columns = [slopes[name][:, slice(*(self.rows or (None,)))].sum(axis=1) for name in self.tensors]
        total: Floats = np.sum(columns, axis=0, dtype=np.float64)
        return total


def parts_of(rows: Mapping[str, int], family: Family) -> list[Part]:
    """The widest first: of two that no data can tell apart, the first is named. `rows` by tensor, in order."""
    found: dict[frozenset[str], Part] = {}
    for part in (*_together(list(rows), family), *(Part(name, (name,)) for name in rows)):
        found.setdefault(frozenset(part.tensors), part)
    # One tensor has its own name, whatever else it is all of.
    whole = [
        Part(part.tensors[0], part.tensors) if len(part.tensors) == 1 else part for part in found.values()
    ]
    return [*whole, *_pieces(rows)]


def grouped(names: Iterable[str], family: Family, grouping: Grouping) -> list[Part]:
    """The groups of a grouping, in the order of the forward."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(grouping(family, name), []).append(name)
    return [Part(label, tuple(group)) for label, group in groups.items()]


def _together(names: Sequence[str], family: Family) -> Iterator[Part]:
    yield Part(WHOLE, tuple(names))
    for grouping in GROUPINGS:
        yield from grouped(names, family, grouping)
    modules: dict[str, list[str]] = {}
    for name in names:
        words = name.split(".")
        for end in range(1, len(words)):
            modules.setdefault(".".join(words[:end]), []).append(name)
    yield from (Part(module, tuple(group)) for module, group in modules.items())


def _pieces(rows: Mapping[str, int]) -> Iterator[Part]:
    for count in PIECES:
        for name, size in rows.items():
            if size < 2 * count:
                continue
            edges = [size * number // count for number in range(count + 1)]
            for first, last in pairwise(edges):
                yield Part(name, (name,), (first, last))
