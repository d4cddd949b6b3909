"""Which tile of queries belongs to which sequence, in an engine's step and in a trainer's forward. Worked out once for all layers."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from zerodrift.exact.ops.interface import Query, Segments
from zerodrift.exact.ops.triton.attention import Layout, QueryTile, Tiles, tile_for
from zerodrift.exact.ops.triton.attention_backward import Walks, walk_tiles


class Step:
    """Queries of one step, on `device`."""

    def __init__(self, counts: Sequence[int], layout: Layout, queries: Sequence[Query] = ()) -> None:
        """`counts` are the most tokens that each sequence may have, by the layout."""
        self.queries, self.counts, self.layout = queries, counts, layout
        self._tiles: dict[tuple[int, int], Tiles] = {}
        self._walks: dict[tuple[int, int], Walks] = {}

    @classmethod
    def of(cls, queries: Sequence[Query], device: torch.device) -> "Step":
        """What the host knows, brought to the device."""
        counts, lengths = (
            [query.end - query.begin for query in queries],
            [len(query.table_J) for query in queries],
        )
        begins, firsts = [query.begin for query in queries], [query.first for query in queries]
        start, tokens, first, table_start = (
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in (begins, counts, firsts, [0, *accumulate(lengths)][:-1])
        )
        tables = torch.cat([query.table_J for query in queries]).to(device=device, dtype=torch.int32)
        return cls(counts, Layout(start, tokens, first, table_start, tables), queries)

    @classmethod
    def of_whole(cls, segments: Segments, device: torch.device) -> "Step":
        """Sequences from position 0 on, whose keys lie beside their queries: no tables."""
        counts = [end - begin for begin, end in zip(*segments, strict=True)]
        start, tokens = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in (segments.starts, counts)
        )
        nothing = torch.zeros_like(start)
        return cls(counts, Layout(start, tokens, nothing, nothing, nothing))

    def tiles(self, group: int, size: int) -> Tiles:
        """For models with `group` query heads per kv head, of `size`."""
        if (group, size) not in self._tiles:
            self._tiles[group, size] = self._over(group, tile_for(max(self.counts) * group, size))
        return self._tiles[group, size]

    def walks(self, group: int, size: int) -> Walks:
        """The same for a backward."""
        if (group, size) not in self._walks:
            queries, keys = (
                self._over(rows, QueryTile(tile.keeps, tile.warps, tile.stages))
                for rows, tile in zip((group, 1), walk_tiles(size), strict=True)
            )
            self._walks[group, size] = Walks(self.layout, queries, keys)
        return self._walks[group, size]

    def _over(self, rows_of_token: int, tile: QueryTile) -> Tiles:
        firsts = [range(0, count * rows_of_token, tile.rows) for count in self.counts]
        sequences = [index for index, each in enumerate(firsts) for _ in each]
        return Tiles(tile, self._int(sequences), self._int([first for each in firsts for first in each]))

    def _int(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.layout.start.device)
