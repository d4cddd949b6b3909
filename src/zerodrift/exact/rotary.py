"""Rotary embeddings: the model's own for static frequencies, and a causal form of dynamic NTK.

`transformers` lets dynamic NTK take its frequencies from the longest sequence of the forward, so that a token's
logprob would depend on its neighbours and on tokens after it. Here a token at position p takes the frequencies of
length p + 1: what transformers itself computes when it decodes token by token over a cache, and the only reading
under which prefill and decode can agree.
"""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
ROPE_TYPES = (*STATIC_ROPE_TYPES, "dynamic")
_CHUNK = 64
"""Positions whose frequencies are worked out together, always as many: pow takes another path for leftovers."""


class Frequencies(dict[int, torch.Tensor]):
    """By number of the chunk, worked out as positions come."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Frequencies":
        # A copy works out its own: an engine's model is copied while its steps add to these.
        return Frequencies()


def exchange_rotary(module: Any) -> None:
    """Give `module` the causal forward if its frequencies are dynamic; static ones are left alone."""
    if module.rope_type != "dynamic":
        return
    original = type(module)
    module.exact_original = (original,)
    module.exact_frequencies = Frequencies()
    module.__class__ = type("ExactRotary", (original,), {"forward": _forward})


def give_back_rotary(module: Any) -> None:
    """Undo `exchange_rotary`."""
    module.__class__ = module.exact_original[0]
    del module.exact_original, module.exact_frequencies


@torch.no_grad()
def _forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positions = position_ids.to(x.device)
    inv_freq = self.original_inv_freq.to(x.device).float().expand(*positions.shape, -1)
    if int(positions.max()) >= self.original_max_seq_len:
        inv_freq = _per_position(self, positions)
    freqs = positions[..., None].float() * inv_freq
    both = torch.cat((freqs, freqs), dim=-1)
    return (both.cos() * self.attention_scaling).to(x.dtype), (both.sin() * self.attention_scaling).to(
        x.dtype
    )


def _per_position(self: Any, positions: torch.Tensor) -> torch.Tensor:
    chunks = positions // _CHUNK
    numbers = sorted(set(chunks.flatten().tolist()))
    for number in numbers:
        if number not in self.exact_frequencies:
            self.exact_frequencies[number] = torch.stack(
                [
                    _frequencies(self, length)
                    for length in range(number * _CHUNK + 1, (number + 1) * _CHUNK + 1)
                ]
            )
    table = torch.cat([self.exact_frequencies[number] for number in numbers]).to(positions.device)
    order = torch.searchsorted(torch.tensor(numbers, device=positions.device), chunks)
    return table[order * _CHUNK + positions % _CHUNK]


def _frequencies(self: Any, length: int) -> torch.Tensor:
    if length <= self.original_max_seq_len:
        return self.original_inv_freq.cpu().float()  # type: ignore[no-any-return]
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](self.config, torch.device("cpu"), seq_len=length)
    return inv_freq.float()  # type: ignore[no-any-return]
