"""Faults of precision and of execution: right weights, right positions, and numbers that come out otherwise.

Shapes: B rows, L positions, H hidden, V vocabulary.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zerodrift.core.errors import UnsupportedModel
from zerodrift.faults.damage import Damage, damaged, replace_head
from zerodrift.faults.wrapper import Plant
from zerodrift.models.family.parts import ModelParts

FP8_MAX = 448.0
"""Largest finite e4m3; what is above becomes NaN unless it is saturated, as engines do."""

_NOISE = 1e-4


def _head_in(dtype: torch.dtype) -> Damage:
    return lambda model: replace_head(
        model, lambda hidden_BLH, weight_VH: functional.linear(hidden_BLH.to(dtype), weight_VH.to(dtype))
    )


def _body_in(dtype: torch.dtype) -> Damage:
    """Layers and final norm in `dtype`. Embedding and head keep theirs: the head is another cause, and the tie."""

    def damage(model: Any) -> None:
        parts, wide = ModelParts(model), model.dtype
        for part in (*parts.layers, parts.final_norm):
            # Parameters only: `.to` would round rotary tables too, which no engine does.
            for parameter in part.parameters():
                parameter.data = parameter.data.to(dtype)
        parts.embedding.register_forward_hook(lambda _, __, hidden_BLH: hidden_BLH.to(dtype))
        # Learned positions are added in between, in their own dtype.
        parts.layers[0].register_forward_pre_hook(lambda _, given: (given[0].to(dtype), *given[1:]))
        parts.final_norm.register_forward_hook(lambda _, __, hidden_BLH: hidden_BLH.to(wide))

    return damage


def _quantised(bits: int, group: int) -> Damage:
    """Round to nearest, symmetric, one scale per `group` inputs of each output."""
    levels = 2 ** (bits - 1) - 1

    def damage(model: Any) -> None:
        parts = ModelParts(model)
        modules = chain.from_iterable(layer.modules() for layer in parts.layers)
        linears = [module for module in modules if isinstance(module, nn.Linear)]
        if not linears:
            raise UnsupportedModel(f"{parts.family.name} shows no linear to quantise in its layers")
        for module in linears:
            groups = module.weight.data.view(module.out_features, -1, group)
            scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / levels
            module.weight.data = ((groups / scale).round() * scale).flatten(-2)

    return damage


class _LossyCache:
    """Stands in for the KV cache of one forward: what goes in comes out through fp8."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any) -> Any:
        """Stored where there is a cache; without one, keys and values make the same round trip."""
        keys, values = _through_fp8(keys), _through_fp8(values)
        return (keys, values) if self._cache is None else self._cache.update(keys, values, layer, *rest)


def _through_fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(tensor.dtype)


def _lossy_kv(model: Any) -> None:
    def store(_: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        return args, {**options, "past_key_values": _LossyCache(options.get("past_key_values"))}

    for attention in ModelParts(model).attentions():
        attention.register_forward_pre_hook(store, with_kwargs=True)


def _rounded_decode(model: Any) -> None:
    """Attention outputs of single-token steps go through bf16, as where decoding has a kernel of its own."""

    def narrow(module: Any, _: Any, options: dict[str, Any], output: Any) -> Any:
        hidden_BLH, *others = output
        cache = options.get("past_key_values")
        # A prompt of one token is a prefill: nothing was cached before it.
        if hidden_BLH.shape[1] > 1 or cache is None or cache.get_seq_length(module.layer_idx) == 1:
            return output
        return hidden_BLH.to(torch.bfloat16).to(hidden_BLH.dtype), *others

    for attention in ModelParts(model).attentions():
        attention.register_forward_hook(narrow, with_kwargs=True)


def _split_by_rows(model: Any) -> None:
    """The head's sum is split into as many parts as the batch has rows, and each part is rounded to fp16."""

    def multiply(hidden_BLH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        parts = min(len(hidden_BLH), hidden_BLH.shape[-1])
        if parts == 1:
            return functional.linear(hidden_BLH, weight_VH)
        pairs = zip(
            hidden_BLH.tensor_split(parts, dim=-1), weight_VH.tensor_split(parts, dim=-1), strict=True
        )
        partial = [functional.linear(some_BLH, some_VH).half().double() for some_BLH, some_VH in pairs]
        return torch.stack(partial).sum(dim=0)

    replace_head(model, multiply)


def _noisy(model: Any) -> None:
    """Logits with a relative error that is new in every call."""
    generator = torch.Generator().manual_seed(0)

    def multiply(hidden_BLH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        logits_BLV = functional.linear(hidden_BLH, weight_VH)
        noise_BLV = torch.randn(logits_BLV.shape, generator=generator).to(logits_BLV)
        return logits_BLV * (1 + _NOISE * noise_BLV)

    replace_head(model, multiply)


PRECISION_FAULTS: Mapping[str, Plant] = {
    "path/head-precision:bf16": damaged(_head_in(torch.bfloat16)),
    "path/body-precision:bf16": damaged(_body_in(torch.bfloat16)),
    "path/body-precision:fp16": damaged(_body_in(torch.float16)),
    "path/weight-quantisation:4-bit": damaged(_quantised(bits=4, group=32)),
    "path/weight-quantisation:8-bit": damaged(_quantised(bits=8, group=32)),
    "path/kv-precision:fp8": damaged(_lossy_kv),
    "path/prefill-decode:bf16-attention": damaged(_rounded_decode),
    "path/batch-variance:split-head": damaged(_split_by_rows),
    "path/nondeterminism:noise": damaged(_noisy),
}
