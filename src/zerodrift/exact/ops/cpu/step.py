"""One engine step as the CPU computes it: which pages to gather, and which sequences to compute together.

Sequences that decode one token are computed in groups of about as many key blocks; the shorter ones get hidden
blocks, which change no bit. All of it is worked out once per step and used by every layer.
Shapes: S sequences of a group, J pages, L keys, C kv heads.
"""

from functools import cached_property
from typing import NamedTuple

import torch

from zerodrift.exact.ops.cpu.attention import BLOCK, hidden_keys

GATHER_KEYS = 16384
"""Keys gathered for one group, over all its sequences."""
MAX_PADDING = 0.25
"""A sequence joins a group if at most this share of its keys would be padding."""


class Pages(NamedTuple):
    """How keys lie in memory: [num_blocks, C, block_size, D]."""

    block_size: int
    num_kv_heads: int


class Query(NamedTuple):
    """Tokens of one sequence in this step."""

    begin: int
    end: int
    first: int
    """Position of the first of them."""
    table_J: torch.Tensor
    """Blocks that cover positions 0 to the last."""

    @property
    def last(self) -> int:
        """Position of the last token."""
        return self.first + self.end - self.begin - 1


class Gather(NamedTuple):
    """Where keys `first`…`first`+`length` of some sequences are."""

    rows: torch.Tensor
    """Rows of the pages seen as [num_blocks · C, block_size · D], ordered by sequence, head, position."""
    offset: int
    """Keys to skip at the start of the first page."""
    first: int
    length: int


class Group(NamedTuple):
    """Sequences that decode one token each."""

    tokens_S: torch.Tensor
    gather: Gather
    hidden_SL: torch.Tensor


class Step:
    """All queries of one step."""

    def __init__(self, queries: list[Query], pages: Pages) -> None:
        self.queries = queries
        self.pages = pages
        self._groups: dict[int | None, list[Group]] = {}

    @cached_property
    def chunks(self) -> list[Query]:
        """Sequences with several tokens."""
        return [query for query in self.queries if query.end - query.begin > 1]

    def groups(self, window: int | None) -> list[Group]:
        """Sequences with one token, for layers with this window."""
        if window not in self._groups:
            singles = [query for query in self.queries if query.end - query.begin == 1]
            self._groups[window] = [self._group(members, window) for members in _alike(singles, window)]
        return self._groups[window]

    def gather(self, query: Query, window: int | None) -> Gather:
        """Keys that the tokens of `query` look at."""
        first = _first_block(query.first, window)
        return self._gather([query], first, _end_block(query.last) - first)

    def _group(self, members: list[Query], window: int | None) -> Group:
        first = min(_first_block(query.first, window) for query in members)
        length = max(_end_block(query.last) for query in members) - first
        positions_S = torch.tensor([query.first for query in members])
        return Group(
            torch.tensor([query.begin for query in members]),
            self._gather(members, first, length),
            hidden_keys(positions_S, first, length, window),
        )

    def _gather(self, members: list[Query], first: int, length: int) -> Gather:
        size, heads = self.pages
        begin, end = first // size, -(-(first + length) // size)
        # Where a table ends, its own first block stands in: those keys are hidden, and its values are finite
        # unless this very sequence has gone wrong.
        blocks_SJ = torch.stack(
            [
                torch.cat([query.table_J[begin:end], query.table_J[:1].expand(end - begin)])[: end - begin]
                for query in members
            ]
        )
        rows_SCJ = blocks_SJ[:, None] * heads + torch.arange(heads)[None, :, None]
        return Gather(rows_SCJ.flatten(), first - begin * size, first, length)


def _alike(singles: list[Query], window: int | None) -> list[list[Query]]:
    """Groups of about equal length, longest first."""
    groups: list[list[Query]] = []
    keys = 0
    for query in sorted(singles, key=lambda each: -each.last):
        span = _end_block(query.last) - _first_block(query.first, window)
        if groups:
            head = groups[-1][0]
            longest = _end_block(head.last) - _first_block(groups[-1][-1].first, window)
            alike = span >= longest * (1 - MAX_PADDING) or longest - span <= BLOCK
            apart = _end_block(head.last) - _first_block(query.first, window) > longest + BLOCK
            if alike and not apart and (len(groups[-1]) + 1) * max(keys, span) <= GATHER_KEYS:
                groups[-1].append(query)
                continue
        groups.append([query])
        keys = span
    return groups


def _first_block(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1) // BLOCK * BLOCK


def _end_block(position: int) -> int:
    return (position // BLOCK + 1) * BLOCK
