"""A fault of a batch: its prompts are prefilled in one row, and nothing keeps them apart.

Every sequence has its own positions, and decodes over its own keys and values; but those were computed with all prompts
before it in sight.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache

from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.faults.wrapper import FaultyBackend, Plant, clone, the_reference


class _Packed:
    """A model whose first pass puts all rows of a batch into one."""

    def __init__(self, model: Any) -> None:
        self.dtype, self.device, self.config = model.dtype, model.device, model.config
        self._model = model

    def __call__(self, ids_BL: torch.Tensor, **options: Any) -> Any:
        """The model's own call, as `sample` makes it: rows are padded on the left."""
        if options["past_key_values"] is not None:
            return self._model(ids_BL, **options)
        real_BL = options["attention_mask"].bool()
        lengths = real_BL.sum(dim=-1).tolist()
        packed_1T, cache = ids_BL[real_BL][None], DynamicCache()
        output = self._model(
            packed_1T,
            attention_mask=torch.ones_like(packed_1T),
            position_ids=options["position_ids"][real_BL][None],
            past_key_values=cache,
            use_cache=True,
        )
        own = DynamicCache()
        for number, layer in enumerate(cache.layers):
            own.update(_apart(layer.keys, lengths), _apart(layer.values, lengths), number)
        ends = torch.tensor(lengths).cumsum(dim=0) - 1
        return SimpleNamespace(logits=output.logits[0, ends][:, None], past_key_values=own)


def _apart(packed: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[1, heads, T, width] to one row for each sequence, padded on the left."""
    longest = max(lengths)
    rows = [
        functional.pad(part, (0, 0, longest - part.shape[-2], 0))
        for part in torch.split(packed, lengths, dim=-2)
    ]
    return torch.cat(rows)


class PackedPrefill(FaultyBackend):
    """Generates so; what is scored is scored alone."""

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """As many requests at once as the reference has rows."""
        reference = the_reference(clone(self.inner))
        reference.model = _Packed(reference.model)
        return reference.generate(requests)


PACKED_FAULTS: Mapping[str, Plant] = {"path/mask:across-sequences": PackedPrefill}
