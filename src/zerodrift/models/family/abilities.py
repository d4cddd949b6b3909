"""What a model of transformers can be asked to do: not every one has a KV cache, or a choice of attention."""

import inspect
from typing import Any

from zerodrift.models.quiet import quiet


def has_kv_cache(model: Any) -> bool:
    """Whether its forward takes keys and values of tokens before; a state-space model keeps something else."""
    forward = getattr(model, "forward", model)
    return "cache_params" not in inspect.signature(forward).parameters


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


def computes_in_fp64(model: Any) -> bool:
    """Whether fp64 weights give fp64 results: eager attention of transformers takes its softmax in fp32, where the lowest
    fp64 number is -inf and a row of padding without a key in its window becomes NaN (Gemma 2, which has no other)."""
    return usable_attention(model, "sdpa") == "sdpa" or not has_kv_cache(model)


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
