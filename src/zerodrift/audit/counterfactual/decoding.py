"""What decoding made of tokens that a prefill makes rightly: at which positions they stood, and how their keys and values
were kept. Outputs alone are computed so; the prompt before them is as it should be, and with it their first token."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from zerodrift.audit.counterfactual.attention import computed_by
from zerodrift.audit.counterfactual.prefill import PrefillReading, reader
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.backends.teacher import entries
from zerodrift.core.completion import Completion
from zerodrift.models.family.abilities import has_a_choice_of_attention
from zerodrift.models.family.rope import rope_bases
from zerodrift.stats.arrays import Floats

LEFT_OVER = 0.1
"""Share of the difference that a true account may leave: a key at the edge of two numbers falls on either side."""
OFFSETS = (1, -1, 2, -2, 3, 4, 5, 6, 7, 8)
"""Positions that a counter is off by: it moves once too often for each token that a step speculates on or pads."""
KEPT_IN = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 (e4m3)": torch.float8_e4m3fn,
    "fp8 (e5m2)": torch.float8_e5m2,
}
NAME = "zerodrift_kept_narrow"
_KEPT = "zerodrift_kept"


class Decoded(NamedTuple):
    """What was done, and how much of the difference it explains."""

    cause: str
    message: str
    explained: float


class _Kept(NamedTuple):
    """How keys and values come back to the tokens of an output."""

    prompt: int
    dtype: torch.dtype
    prompt_too: bool


def decoded_otherwise(
    model: Any, completions: Sequence[Completion], right: Sequence[Floats]
) -> Decoded | None:
    """What predicts the logprobs of outputs that are `right` where they are scored; None where nothing here does."""
    reported = np.concatenate([np.array(one.logprobs) for one in completions])
    whole = float(np.abs(reported - np.concatenate(list(right))).sum())
    best: Decoded | None = None
    for variant in _variants(model):
        explained = 1 - float(np.abs(reported - _predicted(model, variant, completions)).sum()) / whole
        if explained >= 1 - LEFT_OVER and (best is None or explained > best.explained):
            best = Decoded(variant.cause, variant.message, explained)
    return best


def _variants(model: Any) -> Iterator[Variant]:
    if rope_bases(model.config):
        for by in OFFSETS:
            message = f"decoded tokens stand {abs(by)} too {'far' if by > 0 else 'near'}"
            yield Variant("path/rope", message, lambda m: m, alone=reader(_ahead(by)))
    if has_a_choice_of_attention(model):
        for name, dtype in KEPT_IN.items():
            for whose, prompt_too in (
                ("decoded tokens", False),
                ("all tokens, as decoding reads them,", True),
            ):
                message = f"keys and values of {whose} are kept in {name}"
                alone = partial(_kept_rows, dtype=dtype, prompt_too=prompt_too)
                yield Variant("path/kv-precision", message, lambda m: m, alone=alone)


def _predicted(model: Any, variant: Variant, completions: Sequence[Completion]) -> Floats:
    assert variant.alone is not None, "what decoding does depends on where the prompt ends"
    rows = (
        variant.alone(model, one.sequence, len(one.prompt_token_ids), len(one.prompt_token_ids))
        for one in completions
    )
    told = [
        entries(rows_TV, one.token_ids).double().numpy()
        for rows_TV, one in zip(rows, completions, strict=True)
    ]
    return np.concatenate(told)


def _ahead(by: int) -> Callable[[int, int], PrefillReading]:
    def read(prompt: int, length: int) -> PrefillReading:
        places = tuple(range(length))
        return PrefillReading(places, tuple(place + by * (place >= prompt) for place in places))

    return read


def _kept_rows(
    model: Any, ids: Sequence[int], prompt: int, start: int, *, dtype: torch.dtype, prompt_too: bool
) -> torch.Tensor:
    changed = _with_kept(model, _Kept(prompt, dtype, prompt_too))
    everything = tuple(range(len(ids)))
    return reader(lambda _, __: PrefillReading(everything, everything))(changed, ids, prompt, start)


def _with_kept(model: Any, kept: _Kept) -> Any:
    """The same weights, with keys and values that are kept so."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return computed_by(NAME, model, _KEPT, kept)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    """Rows of the prompt read what was computed; those of the output what was kept."""
    kept: _Kept = getattr(module.config, _KEPT)
    exact, weights = sdpa_attention_forward(module, query, key, value, *rest, **options)
    begin = 0 if kept.prompt_too else kept.prompt
    narrow = [
        torch.cat([stored[..., :begin, :], stored[..., begin:, :].to(kept.dtype).to(stored.dtype)], dim=-2)
        for stored in (key, value)
    ]
    read, _ = sdpa_attention_forward(module, query, *narrow, *rest, **options)
    # Rows first, then heads: as attention hands them back.
    return torch.cat([exact[:, : kept.prompt], read[:, kept.prompt :]], dim=1), weights
