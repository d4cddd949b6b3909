"""Damage to single steps of decoding alone: prefill and scores stay right."""

from typing import Any

import torch
from torch import nn

from zerodrift.faults.damage import Damage


def positions_ahead(by: int) -> Damage:
    def later(_: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        if options.get("past_key_values") is None:
            return None
        return args, {**options, "position_ids": options["position_ids"] + by}

    return lambda model: model.register_forward_pre_hook(later, with_kwargs=True)


class _Narrow:
    """A KV cache that keeps what single steps add in less precision."""

    def __init__(self, cache: Any, dtype: torch.dtype) -> None:
        self._cache, self._dtype = cache, dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> Any:
        if keys.shape[-2] == 1:
            keys, values = (each.to(self._dtype).to(each.dtype) for each in (keys, values))
        return self._cache.update(keys, values, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def narrow_kv(dtype: torch.dtype) -> Damage:
    def store(_: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        if options.get("past_key_values") is None:
            return None
        return args, {**options, "past_key_values": _Narrow(options["past_key_values"], dtype)}

    def damage(model: Any) -> None:
        for layer in model.base_model.layers:
            layer.self_attn.register_forward_pre_hook(store, with_kwargs=True)

    return damage


def quieter_steps(factor: float) -> Damage:
    """Of single steps the MLP of one layer is too quiet: nothing that anybody has a counterfactual of."""

    def quiet(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factor if output.shape[1] == 1 else output

    return lambda model: model.base_model.layers[1].mlp.register_forward_hook(quiet)
