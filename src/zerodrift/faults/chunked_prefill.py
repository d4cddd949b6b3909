"""A reference engine that prefills in chunks, as real engines do: sound by default, and a host for its faults."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache

from zerodrift.backends.base import Backend
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.faults.wrapper import FaultyBackend, Plant, clone, the_reference

CHUNK = 64

Begin = Callable[[int, int], int]
"""Where a chunk should begin, and where it ends, to where it does begin."""
Place = Callable[[torch.Tensor], torch.Tensor]
"""Positions of a later chunk to those that are used."""


class _Chunked:
    """A model whose first pass of a request is made chunk by chunk; the cache knows what was read."""

    def __init__(self, model: Any, begin: Begin, place: Place, shift: int) -> None:
        self.dtype, self.device, self.config = model.dtype, model.device, model.config
        self._model, self._begin, self._place, self._shift = model, begin, place, shift
        self._late = 0

    def __call__(self, ids_1L: torch.Tensor, **options: Any) -> Any:
        """The model's own call, as `sample` makes it."""
        # One request and no padding: a mask would count the tokens that should have been read.
        options.pop("attention_mask", None)
        positions_1L = options.pop("position_ids")
        if options["past_key_values"] is not None:
            return self._model(ids_1L, position_ids=positions_1L + self._late, **options)
        *_, last = self.chunks(ids_1L, **options)
        return last

    def chunks(self, ids_1L: torch.Tensor, **options: Any) -> Any:
        """What the model gives for each chunk."""
        length = ids_1L.shape[1]
        # Without a config the cache keeps everything, also behind a sliding window.
        options["past_key_values"], options["use_cache"] = DynamicCache(), True
        self._late = self._shift if length > CHUNK else 0
        for begin, end in pairwise((*range(0, length, CHUNK), length)):
            first = self._begin(begin, end) if begin else 0
            positions_L = torch.arange(first, end)
            if begin:
                positions_L = self._place(positions_L) + self._late
            yield self._model(ids_1L[:, first:end], position_ids=positions_L[None], **options)


class ChunkingReference(FaultyBackend):
    """Serves requests one after the other, and prefills each in chunks; scores are taken from such a prefill too."""

    def __init__(
        self,
        engine: Backend,
        *,
        begin: Begin = lambda begin, end: begin,
        place: Place = lambda positions: positions,
        shift: int = 0,
    ) -> None:
        """`begin`, `place` and `shift` are faults; without them chunks change nothing but the order of work."""
        super().__init__(engine)
        self._faults = begin, place, shift

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Each request by itself."""
        reference = the_reference(clone(self.inner))
        reference.model = _Chunked(reference.model, *self._faults)
        reference.batch = 1
        return reference.generate(requests)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """From the rows of every chunk: the last row for each token that was read, none for one that was not."""
        model = _Chunked(the_reference(self.inner).model, *self._faults)
        return [self._scores(model, torch.tensor([list(ids)])) for ids in sequences]

    def _scores(self, model: _Chunked, ids_1L: torch.Tensor) -> list[float]:
        length = ids_1L.shape[1]
        ends = (*range(CHUNK, length, CHUNK), length)
        rows: dict[int, torch.Tensor] = {}
        for end, output in zip(ends, model.chunks(ids_1L), strict=True):
            logits_LV = torch.log_softmax(output.logits[0].double(), dim=-1)
            rows |= {end - len(logits_LV) + index: row_V for index, row_V in enumerate(logits_LV)}
        # The row before stands in for one that was never computed.
        return [float(rows.get(at, rows.get(at - 1))[ids_1L[0, at + 1]]) for at in range(length - 1)]  # type: ignore[index]


def _late(begin: int, end: int) -> int:
    return min(begin + 1, end - 1)


def _early(begin: int, _: int) -> int:
    return begin - 1


def _first_early(positions_L: torch.Tensor) -> torch.Tensor:
    return torch.cat([positions_L[:1] - 1, positions_L[1:]])


CHUNK_FAULTS: Mapping[str, Plant] = {
    "path/chunked-prefill:position-lost": lambda engine: ChunkingReference(engine, begin=_late),
    "path/chunked-prefill:position-repeated": lambda engine: ChunkingReference(engine, begin=_early),
    "path/chunked-prefill:first-position": lambda engine: ChunkingReference(engine, place=_first_early),
    "path/chunked-prefill:offset": lambda engine: ChunkingReference(engine, shift=1),
}
