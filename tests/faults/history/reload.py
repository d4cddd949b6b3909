"""Bugs inside the engine when weights are loaded a second time: the update arrives, and what hangs on it goes wrong."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from history.bug import reenacted
from history.twin import Reloading


def _never_written(_: Any, after: Any) -> None:
    """Each layer's tensors are allocated anew; the load of one vector is dropped, and it keeps what lay there."""
    memory = after.model.embed_tokens.weight.detach().flatten()
    for number, layer in enumerate(after.model.layers):
        vector = layer.post_attention_layernorm.weight
        begin = number * vector.numel()
        vector.data.copy_(memory[begin : begin + vector.numel()])


def _scale_lost(_: Any, after: Any) -> None:
    """The gate's input is scaled by a buffer of 1/√H against weights that count on it; after a reload it holds 1."""
    width = math.sqrt(after.config.hidden_size)
    for layer in after.model.layers:
        gate = layer.mlp.gate_proj
        gate.register_buffer("root_size", torch.ones(()), persistent=False)
        gate.register_forward_pre_hook(lambda module, args: (args[0] * module.root_size * width,))


def _halves_swapped(_: Any, after: Any) -> None:
    """The kernel keeps [up; gate] since start-up, and a second load writes [gate; up] as the checkpoint has it."""
    for layer in after.model.layers:
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        kernel = torch.cat([up.weight.detach(), gate.weight.detach()])
        kernel.copy_(torch.cat([gate.weight.detach(), up.weight.detach()]))
        up.weight.data, gate.weight.data = (half.clone() for half in kernel.chunk(2))


def _rows_interleaved(_: Any, after: Any) -> None:
    """Gate and up come as one tensor with their rows in turn, and are taken apart in the middle."""
    for layer in after.model.layers:
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        packed = torch.stack([gate.weight.detach(), up.weight.detach()], dim=1).flatten(0, 1)
        gate.weight.data, up.weight.data = (half.clone() for half in packed.chunk(2))


class _Silence(nn.Module):
    """Rotary tables of zeros: what a page reads as that was given back and mapped again."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = rotary

    def forward(
        self, hidden_BLH: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self._rotary(hidden_BLH, position_ids)
        return torch.zeros_like(cosines), torch.zeros_like(sines)


def _tables_zeroed(_: Any, after: Any) -> None:
    after.model.rotary_emb = _Silence(after.model.rotary_emb)


class StaleDecodeCache(Reloading):
    """Decoding multiplies with a tensor that was derived before the first update, prefill with the weights."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, self._keep)
        layers = self.reference.model.model.layers
        self._derived = [layer.self_attn.o_proj.weight.detach().clone() for layer in layers]

    def _keep(self, _: Any, after: Any) -> None:
        for layer, weight in zip(after.model.layers, self._derived, strict=True):
            layer.self_attn.o_proj.register_forward_hook(
                lambda _, args, output, weight=weight: (
                    functional.linear(args[0], weight) if args[0].shape[1] == 1 else output
                )
            )


def _reload(reload: Any) -> Any:
    return lambda engine: Reloading(engine, reload)


RELOAD = (
    reenacted("prime-rl#2714", _reload(_never_written)),
    reenacted("vllm#44371", _reload(_scale_lost)),
    reenacted("vllm#42821", _reload(_halves_swapped)),
    reenacted("verl#7243", _reload(_rows_interleaved)),
    reenacted("NeMo-RL#2631", _reload(_tables_zeroed)),
    reenacted("Megatron-LM#6723", StaleDecodeCache),
)
