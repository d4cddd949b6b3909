"""Bugs of the prefix cache: prompts are right, weights are right, and old keys are looked back on."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from transformers import DynamicCache

from history.bug import reenacted
from history.twin import Twin
from zerodrift.backends.base import Capability
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.faults.wrapper import clone, the_reference

Keys = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of a prompt, per layer."""


class _Prefilled:
    """A model whose first pass of a known prompt runs the last token only."""

    def __init__(self, model: Any, known: dict[Any, Keys], salt: str | None) -> None:
        self.dtype, self.device = model.dtype, model.device
        self.reused: list[int] = []
        self._model, self._known, self._salt = model, known, salt

    def __call__(self, ids_1L: torch.Tensor, **options: Any) -> Any:
        if options["past_key_values"] is not None:
            return self._model(ids_1L, **options)
        place = (self._salt, tuple(ids_1L[0].tolist()))
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self._known.get(place, ())):
            cache.update(keys, values, layer)
        begin = cache.get_seq_length()
        options |= {"past_key_values": cache, "position_ids": options["position_ids"][:, begin:]}
        output = self._model(ids_1L[:, begin:], **options)
        last = ids_1L.shape[1] - 1
        if last:
            self._known[place] = [
                (layer.keys[:, :, :last].clone(), layer.values[:, :, :last].clone()) for layer in cache.layers
            ]
        self.reused.append(begin)
        return output


class PrefixesKept(Twin):
    """Prompts are remembered by salt and ids; which weights wrote them is not asked."""

    def __init__(self, engine: Any, *, busy: bool) -> None:
        """An engine that is `busy` has requests running, and forgets nothing then."""
        super().__init__(engine)
        self.capabilities = engine.capabilities | {
            Capability.CACHE_SALT,
            Capability.CACHED_TOKENS,
            Capability.RESET_CACHE,
        }
        self._known: dict[Any, Keys] = {}
        self._busy = busy

    def reset_cache(self) -> None:
        """The refusal is swallowed on its way up."""
        if not self._busy:
            self._known.clear()

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return [self._serve(request) for request in requests]

    def _serve(self, request: Request) -> Answer:
        alone = the_reference(clone(self.reference))
        alone.model = _Prefilled(self.reference.model, self._known, request.prompt.cache_salt)
        alone.batch = 1
        (answer,) = alone.generate([request])
        return msgspec.structs.replace(
            answer,
            completions=tuple(
                msgspec.structs.replace(each, cached_tokens=reused)
                for each, reused in zip(answer.completions, alone.model.reused, strict=True)
            ),
        )


CACHES = (
    reenacted("NeMo-RL#4018", lambda engine: PrefixesKept(engine, busy=False)),
    reenacted("SkyRL#1824", lambda engine: PrefixesKept(engine, busy=True)),
)
