"""A reference engine with a prefix cache, which real engines have: sound by default, and a host for its faults.

The cache holds keys and values of full blocks of prompt tokens, by salt and by every token up to the block's end.
A sound cache also asks which weights wrote a block, so that an update makes all of them unknown.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import torch
from transformers import DynamicCache

from zerodrift.backends.base import Backend, Capability
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference

BLOCK = 16
"""Tokens per block, as in vLLM."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [1, heads, positions, width] each."""

Spoil = Callable[[torch.Tensor, torch.Tensor], Pair]
"""What happens to keys and values when a block is reused."""

_Block = list[Pair]
"""One block, per layer."""


class _CachedPrefill:
    """A model for one request: its first pass starts behind the longest known prefix, and leaves its blocks behind."""

    def __init__(self, model: Any, blocks: dict[Hashable, _Block], key: Hashable, spoil: Spoil) -> None:
        self.dtype, self.device = model.dtype, model.device
        self.hits: list[int] = []
        self._model = model
        self._blocks = blocks
        self._key = key
        self._spoil = spoil

    def __call__(self, ids_1L: torch.Tensor, **options: Any) -> Any:
        """The model's own call, as `sample` makes it; later passes have a cache already and are left alone."""
        if options["past_key_values"] is not None:
            return self._model(ids_1L, **options)
        prompt = tuple(ids_1L[0].tolist())
        known = self._known(prompt)
        # Without a config the cache keeps everything, also behind a sliding window: blocks are cut from it.
        cache = DynamicCache()
        for block in known:
            for layer, (keys, values) in enumerate(block):
                cache.update(*self._spoil(keys, values), layer)
        begin = BLOCK * len(known)
        options |= {"past_key_values": cache, "position_ids": options["position_ids"][:, begin:]}
        output = self._model(ids_1L[:, begin:], **options)
        self._keep(prompt, cache, len(known))
        self.hits.append(begin)
        return output

    def _known(self, prompt: tuple[int, ...]) -> list[_Block]:
        known = []
        # The last token always runs: its logits are what the request is about.
        for end in range(BLOCK, len(prompt), BLOCK):
            block = self._blocks.get((self._key, prompt[:end]))
            if block is None:
                break
            known.append(block)
        return known

    def _keep(self, prompt: tuple[int, ...], cache: DynamicCache, known: int) -> None:
        for end in range(BLOCK * (known + 1), len(prompt) + 1, BLOCK):
            place = slice(end - BLOCK, end)
            self._blocks[self._key, prompt[:end]] = [
                (layer.keys[:, :, place].clone(), layer.values[:, :, place].clone()) for layer in cache.layers
            ]


class PrefixCachingReference(FaultyBackend):
    """Serves requests one after the other over a cache of prompt prefixes. Scoring uses no cache."""

    def __init__(
        self,
        engine: Backend,
        *,
        spoil: Spoil = lambda keys, values: (keys, values),
        outlives_weights: bool = False,
        outlives_reset: bool = False,
    ) -> None:
        """`spoil` and the two flags are faults; without them the cache changes nothing but the work."""
        super().__init__(engine)
        self.capabilities = engine.capabilities | {
            Capability.CACHE_SALT,
            Capability.CACHED_TOKENS,
            Capability.RESET_CACHE,
        }
        self._spoil = spoil
        self._outlives_weights = outlives_weights
        self._outlives_reset = outlives_reset
        self._blocks: dict[Hashable, _Block] = {}

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Each sample is prefilled by itself, so the second sample of a prompt finds what the first one left."""
        return [self._serve(request) for request in requests]

    def reset_cache(self) -> None:
        """Forgets every block."""
        self.inner.reset_cache()
        if not self._outlives_reset:
            self._blocks.clear()

    def _serve(self, request: Request) -> Answer:
        reference = the_reference(clone(self.inner))
        weights = None if self._outlives_weights else reference.version
        model = _CachedPrefill(
            reference.model, self._blocks, (weights, request.prompt.cache_salt), self._spoil
        )
        reference.model, reference.batch = model, 1
        (answer,) = reference.generate([request])
        completions = tuple(
            msgspec.structs.replace(completion, cached_tokens=hit)
            for completion, hit in zip(answer.completions, model.hits, strict=True)
        )
        return msgspec.structs.replace(answer, completions=completions)


def _through_bf16(keys: torch.Tensor, values: torch.Tensor) -> Pair:
    return keys.to(torch.bfloat16).to(keys.dtype), values.to(torch.bfloat16).to(values.dtype)


def _misaligned(keys: torch.Tensor, values: torch.Tensor) -> Pair:
    """Values alone: attention does not mind the order of its pairs, only which value goes with which key."""
    return keys, values.roll(1, dims=-2)


CACHE_FAULTS = (
    Fault(
        "path/prefix-cache",
        "bf16",
        "Keeps cached prefixes in bf16, so that a warm prompt gives other numbers than a cold one.",
        lambda engine: PrefixCachingReference(engine, spoil=_through_bf16),
        (Need.REFERENCE,),
    ),
    Fault(
        "path/prefix-cache",
        "misaligned",
        "Reads the values of cached blocks one position off their keys.",
        lambda engine: PrefixCachingReference(engine, spoil=_misaligned),
        (Need.REFERENCE,),
    ),
    Fault(
        "weights/stale-prefix-cache",
        "kept",
        "Reuses prefixes that older weights wrote, until the cache is reset.",
        lambda engine: PrefixCachingReference(engine, outlives_weights=True),
        (Need.REFERENCE, Need.SYNC, Need.KEPT_CACHE),
    ),
    Fault(
        "weights/stale-prefix-cache",
        "reset-ignored",
        "Reuses prefixes that older weights wrote, and a reset of the cache does nothing.",
        lambda engine: PrefixCachingReference(engine, outlives_weights=True, outlives_reset=True),
        (Need.REFERENCE, Need.SYNC),
    ),
)
