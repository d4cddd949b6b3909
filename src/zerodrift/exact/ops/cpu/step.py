"""One engine step as the CPU computes it: which pages to gather, and which sequences to compute together.

Sequences that decode one token are computed in groups of about as many key blocks; the shorter ones get hidden
blocks, which change no bit. All of it is worked out once per step and used by every layer.
Shapes: S sequences of a group, J pages, L keys, C kv heads.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import torch

from zerodrift.exact.ops.cpu.attention import Hidden, end_block, first_block, hidden_keys
from zerodrift.exact.ops.cpu.blocks import BLOCK
from zerodrift.exact.ops.interface import Query

GATHER_KEYS = 3072
"""Keys gathered for one group, over all its sequences: what is copied is read again while it is in the cache."""
MAX_PADDING = 0.25
"""A sequence joins a group if at most this share of the keys computed for it, or one block, is padding."""


class Pages(NamedTuple):
    """How keys lie in memory: [num_blocks, C, block_size, D]."""

    block_size: int
    num_kv_heads: int


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

    begin: int
    """First of its sequences in the order of `Singles`."""
    end: int
    gather: Gather
    hidden: Hidden


class Singles(NamedTuple):
    """All sequences that decode one token, longest first."""

    tokens_S: torch.Tensor
    groups: list[Group]


class Step:
    """All queries of one step."""

    def __init__(self, queries: list[Query], pages: Pages, windows: Collection[int | None]) -> None:
        self.pages = pages
        self.chunks = [query for query in queries if query.end - query.begin > 1]
        """Sequences with several tokens."""
        self._rooms: list[torch.Tensor | None] = [None, None]
        singles = [query for query in queries if query.end - query.begin == 1]
        self._singles = {window: self._grouped(singles, window) for window in windows}

    def singles(self, window: int | None) -> Singles:
        """Sequences with one token, for layers with this window."""
        return self._singles[window]

    def room(self, which: int, rows: int, pages: torch.Tensor) -> torch.Tensor:
        """Memory for `rows` gathered page rows, the same for all groups and layers. With fresh memory each time, decode
        took 1.08 times as long as with SDPA at 64 sequences; with this, as long."""
        needed = rows * pages.shape[-1]
        room = self._rooms[which]
        if room is None or room.numel() < needed:
            room = self._rooms[which] = pages.new_empty(needed)
        return room[:needed].view(rows, -1)

    def gather(self, query: Query, window: int | None) -> Gather:
        """Keys that the tokens of `query` look at."""
        first = first_block(query.first, window)
        return self._gather([query], first, end_block(query.last) - first)

    def _grouped(self, singles: list[Query], window: int | None) -> Singles:
        ordered, groups = sorted(singles, key=lambda query: -query.last), []
        for begin, end in _alike(ordered, window):
            members = ordered[begin:end]
            first = min(first_block(query.first, window) for query in members)
            length = max(end_block(query.last) for query in members) - first
            hidden = hidden_keys(torch.tensor([query.first for query in members]), first, length, window)
            groups.append(Group(begin, end, self._gather(members, first, length), hidden))
        return Singles(torch.tensor([query.begin for query in ordered]), groups)

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


def _alike(ordered: list[Query], window: int | None) -> list[tuple[int, int]]:
    """Runs of sequences of about equal length, out of all in falling order of length."""
    cuts = [0]
    for index, query in enumerate(ordered):
        longest = ordered[cuts[-1]]
        keys = end_block(longest.last) - first_block(query.first, window)
        padding = keys - (end_block(query.last) - first_block(longest.first, window))
        fits = (index + 1 - cuts[-1]) * keys <= GATHER_KEYS and padding <= max(BLOCK, MAX_PADDING * keys)
        if index > cuts[-1] and not fits:
            cuts.append(index)
    return list(pairwise([*cuts, len(ordered)])) if ordered else []
