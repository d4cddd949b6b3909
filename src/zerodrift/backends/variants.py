"""Copies of a model that compute the same function another way: in less precision, or with other positions.

A copy is made for each variant, which may share weights with the original; that is never touched. Used to measure how far rounding alone moves a
logprob, and to ask what an engine would have reported had it computed like this.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from zerodrift.models.copies import sharing
from zerodrift.models.family import rope
from zerodrift.models.placing import place

FP8_KV = "zerodrift_fp8_kv"
NO_WINDOW = 2**20
"""Wider than any context."""
QUANT_GROUP = 32
"""Weights that share one scale, as in the common 4-bit formats."""


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Weights and activations in `dtype`, head included."""
    changed = sharing(model)
    # Parameters alone: `.to` would round rotary frequencies too, which no engine does. On 800 tokens of a testbed model
    # in bf16 that more than doubled what was taken for rounding, from 0.043 to 0.103 nats a token.
    for parameter in changed.parameters():
        parameter.data = parameter.data.to(dtype)
    return changed


def with_head(model: Any, dtype: torch.dtype) -> Any:
    """The output head computed and rounded in `dtype`, the rest as it is."""
    changed = sharing(model)
    changed.set_output_embeddings(RoundedHead(changed.get_output_embeddings(), dtype))
    return changed


class RoundedHead(nn.Module):
    """A head whose operands and result are rounded to `dtype`; the result comes back in the input's dtype."""

    def __init__(self, head: nn.Module, dtype: torch.dtype) -> None:
        """The head's weight is copied in `dtype`, so that a tied embedding keeps its own."""
        super().__init__()
        self.dtype = dtype
        self.register_buffer("weight", head.get_parameter("weight").detach().to(dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits on the grid of `dtype`, as engines without an fp32 head report them."""
        weight = self.get_buffer("weight")
        return nn.functional.linear(hidden.to(self.dtype), weight).to(hidden.dtype)


def with_quantised_weights(model: Any, bits: int, group: int = QUANT_GROUP) -> Any:
    """Every linear but the head rounded to `bits`-bit integers with one absmax scale per `group` weights."""
    top = 2 ** (bits - 1) - 1

    def absmax(groups: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / top
        return (groups / scale).round() * scale

    return _with_rounded_linears(model, absmax, group)


def with_q4_0_weights(model: Any) -> Any:
    """Every linear but the head in GGUF's Q4_0: sixteen steps from the weight of largest size to nearly its opposite.

    Which of the two ends is reached depends on that weight's sign, so its errors are not those of a symmetric scale.
    """

    def q4_0(groups: torch.Tensor) -> torch.Tensor:
        largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
        step = torch.where(largest == 0, torch.ones_like(largest), largest) / -8
        # Rounded with the step in full, and stored with it in fp16.
        return ((groups / step + 8.5).floor().clamp(0, 15) - 8) * step.half().to(groups.dtype)

    return _with_rounded_linears(model, q4_0, QUANT_GROUP)


def has_groups_of(model: Any, group: int) -> bool:
    """Whether the inputs of every linear but the head can be cut into groups of this many."""
    return all(linear.in_features % group == 0 for linear in _linears(model))


def _with_rounded_linears(model: Any, rounded: Callable[[torch.Tensor], torch.Tensor], group: int) -> Any:
    changed = sharing(model)
    for linear in _linears(changed):
        weight = linear.weight.data
        linear.weight.data = rounded(weight.reshape(-1, group)).reshape(weight.shape)
    return changed


def _linears(model: Any) -> list[nn.Linear]:
    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]


def with_fp8_kv(model: Any) -> Any:
    """Keys and values rounded to fp8 (e4m3) before attention reads them."""
    AttentionInterface.register(FP8_KV, _fp8_kv_attention)
    AttentionMaskInterface.register(FP8_KV, sdpa_mask)
    changed = sharing(model)
    changed.set_attn_implementation(FP8_KV)
    return changed


def _fp8_kv_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> Any:
    rounded = (stored.to(torch.float8_e4m3fn).to(stored.dtype) for stored in (key, value))
    return sdpa_attention_forward(module, query, *rounded, *args, **options)


def with_config(model: Any, change: Callable[[Any], None]) -> Any:
    """The same weights under a changed configuration; buffers such as rotary tables are rebuilt."""
    config = copy.deepcopy(model.config)
    change(config)
    # Every value is overwritten below, and drawing them took 3 of the 3.5 s for 135 million parameters.
    with no_init_weights():
        changed = place(type(model)(config).to(model.dtype).eval(), model.device.type)
    # The weights themselves, not copies: a rotary base is fitted with a dozen models, and none of them is written to.
    changed.load_state_dict(model.state_dict(), assign=True)
    changed.tie_weights()
    return changed


def with_rope_bases(model: Any, bases: Mapping[str, float]) -> Any:
    """Other bases of the rotary embedding, by type of layer; "" is that of all layers."""
    changed = rope.with_rope_bases(model.config, bases)
    return with_config(model, lambda config: setattr(config, "rope_parameters", changed))


def with_window(model: Any, width: int) -> Any:
    """A sliding window of another width."""
    return with_config(model, lambda config: setattr(config, "sliding_window", width))


def without_window(model: Any) -> Any:
    """Full attention where the checkpoint asks for a sliding window: one that nothing leaves."""
    # Not None, nor other types of layers: Gemma makes the mask of windows in any case, and ties rotary bases to types.
    return with_window(model, NO_WINDOW)
