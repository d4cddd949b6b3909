"""Rotary embeddings: the model's own, and of dynamic NTK the part that is one function: up to the trained length.

Beyond it `transformers` takes the frequencies from the longest sequence of the forward, so that a token's logprob
depends on its neighbours and on tokens after it: prefill and decode of vanilla itself are 0.18 nats apart there. No
engine can agree with that, and it is refused. Up to the trained length dynamic frequencies are the default ones.
"""

from typing import Any

import torch

from zerodrift.core.errors import UnsupportedModel

STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
ROPE_TYPES = (*STATIC_ROPE_TYPES, "dynamic")


def exchange_rotary(module: Any) -> None:
    """Give `module` a forward that refuses what is too long if its frequencies are dynamic; static ones are left alone."""
    if module.rope_type != "dynamic":
        return
    original = type(module)
    module.exact_original = (original,)
    module.__class__ = type("ExactRotary", (original,), {"forward": _forward})


def give_back_rotary(module: Any) -> None:
    """Undo `exchange_rotary`."""
    module.__class__ = module.exact_original[0]
    del module.exact_original


@torch.no_grad()
def _forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positions = position_ids.to(x.device)
    if (last := int(positions.max())) >= self.original_max_seq_len:
        raise UnsupportedModel(
            f"rope_type is 'dynamic', and position {last} lies beyond the trained length of {self.original_max_seq_len}: "
            "there a token's numbers depend on the longest sequence beside it, so that no two forwards agree; keep "
            "sequences within that length, or take yarn"
        )
    freqs = positions[..., None].float() * self.original_inv_freq.to(x.device).float()
    both = torch.cat((freqs, freqs), dim=-1)
    return (both.cos() * self.attention_scaling).to(x.dtype), (both.sin() * self.attention_scaling).to(
        x.dtype
    )
