"""What a model of transformers can be asked to do: not every one has a KV cache, or a choice of attention."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from zerodrift.core.errors import UnsupportedModel
from zerodrift.models.quiet import quiet

PROBED = 8
"""Tokens of two texts that differ in the last one."""
MOST_BEFORE = 0.05
"""Of the change of the last row, in rows before it. Two tiny models that read whole texts have 0.55 and one 0.18; causal
ones have none, but for experts, whose rounding may go with the number of rows."""


def has_kv_cache(model: Any) -> bool:
    """Whether its forward goes on from keys and values of tokens before.

    GPT-1 keeps nothing, RWKV a state of its own. Models with recurrent layers, which transformers calls stateful, keep
    part of it in their modules (RecurrentGemma), or read it for single tokens only: a second chunk would begin anew.
    """
    if not isinstance(model, PreTrainedModel):
        return True  # what stands in for a model takes what models with a cache take
    # Of the class: accelerate and others put a forward without names on the instance.
    takes = inspect.signature(type(model).forward).parameters
    return "past_key_values" in takes and not model._is_stateful  # noqa: SLF001  no public getter


def masks_padding(model: Any) -> bool:
    """Whether padding before a text leaves no trace in it: Mamba masks it; RWKV and xLSTM take it for tokens."""
    return has_kv_cache(model) or (
        _is_state_space(model) and "attention_mask" in inspect.signature(type(model).forward).parameters
    )


def cache_in(output: Any) -> Any:
    """Keys and values that a forward left behind; without them a later one would score tokens without their context."""
    kept = getattr(output, "past_key_values", None)
    if kept is None:
        raise UnsupportedModel(
            f"a forward that was to keep keys and values came back with none ({type(output).__name__}); audit a causal "
            "language model: one that reads whole texts at once (is_decoder false in config.json) is none"
        )
    return kept


def has_a_choice_of_attention(model: Any) -> bool:
    """Whether its attention can be replaced through the interface of transformers."""
    return all(usable_attention(model, wanted) == wanted for wanted in ("sdpa", "eager"))


def usable_attention(model: Any, wanted: str) -> str:
    """`wanted` where this model computes with it, and else the one that it came with."""
    # The public setter has no public getter.
    own: str = model.config._attn_implementation  # noqa: SLF001
    if own == wanted or _can_switch(type(model), wanted, model):
        return wanted
    return own


@torch.no_grad()
def require_causal(model: Any) -> None:
    """Another last token changes no row before it. BERT without `is_decoder`, XLNet and XLM read whole texts at once."""
    words = model.config.get_text_config().vocab_size
    ids_2L = (torch.arange(PROBED, device=model.device) % words).repeat(2, 1)
    ids_2L[1, -1] = PROBED % words
    try:
        first_LV, second_LV = (model(input_ids=ids_1L[None], use_cache=False).logits[0] for ids_1L in ids_2L)
    except Exception as error:  # whatever a vendor raises, it comes out as one of ours
        raise UnsupportedModel(
            f"this {type(model).__name__} computes nothing from ids alone, as a causal language model does: {error}"
        ) from error
    changes_L = (first_LV - second_LV).abs().amax(-1)
    if bool(changes_L[:-1].max() > MOST_BEFORE * changes_L[-1]):
        raise UnsupportedModel(
            f"this {type(model).__name__} is no causal language model: another last token changes what it computed of those "
            "before by "
            f"{float(changes_L[:-1].max()):.2g}; where config.json has is_decoder or causal, set it to true if the model was "
            "trained so"
        )


def computes_in_fp64(model: Any) -> bool:
    """Whether fp64 weights give fp64 results: eager attention of transformers takes its softmax in fp32, where the lowest
    fp64 number is -inf and a row of padding without a key in its window becomes NaN (Gemma 2, which has no other)."""
    return usable_attention(model, "sdpa") == "sdpa" or _is_state_space(model)


def _is_state_space(model: Any) -> bool:
    """Without attention, and so without its softmax. (RWKV, which is neither, sums in fp32.)"""
    return "cache_params" in inspect.signature(type(model).forward).parameters


_switches: dict[tuple[type[Any], str], bool] = {}


def _can_switch(kind: type[Any], wanted: str, model: Any) -> bool:
    """Tried once per class: some refuse (Gemma 2 has no sdpa), some only log that they will not (Falcon)."""
    if (kind, wanted) not in _switches:
        before = model.config._attn_implementation  # noqa: SLF001
        try:
            with quiet():
                model.set_attn_implementation(wanted)
            _switches[kind, wanted] = model.config._attn_implementation == wanted  # noqa: SLF001
            if _switches[kind, wanted]:
                model.set_attn_implementation(before)
        except ValueError:
            _switches[kind, wanted] = False
    return _switches[kind, wanted]
