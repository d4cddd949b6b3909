"""One engine step as the GPU computes it: which tile of queries belongs to which sequence. Worked out once per step."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from zerodrift.exact.ops.interface import Query
from zerodrift.exact.ops.triton.attention import Layout, Tiles, tile_for


class Step:
    """Queries of one step, on `device`."""

    def __init__(self, counts: Sequence[int], layout: Layout, queries: Sequence[Query] = ()) -> None:
        """`counts` are the most tokens that each sequence may have, by the layout."""
        self.queries, self.counts, self.layout = queries, counts, layout
        self.device = layout.start.device
        self._tiles: dict[int, Tiles] = {}

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

    def tiles(self, group: int) -> Tiles:
        """For models with `group` query heads per kv head."""
        if group not in self._tiles:
            tile = tile_for(max(self.counts) * group)
            firsts = [range(0, count * group, tile.rows) for count in self.counts]
            sequences = [index for index, each in enumerate(firsts) for _ in each]
            self._tiles[group] = Tiles(
                tile, self._int(sequences), self._int([first for each in firsts for first in each])
            )
        return self._tiles[group]

    def _int(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
