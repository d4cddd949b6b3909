"""Hypotheses about the path: the logits were computed another way. Each costs one forward over the cases.

Precision, quantisation and windows are a grid of what engines do; positions are fitted (`position.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from zerodrift.audit.counterfactual.attention import AttentionChange, with_attention, wrong_groupings
from zerodrift.audit.counterfactual.evaluate import Forward
from zerodrift.audit.counterfactual.explanation import ROUNDED_AS_EXPECTED, VANILLA, Explanation, Hypothesis
from zerodrift.audit.counterfactual.prefill import leak_variants
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.backends import variants
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.models.family.abilities import has_a_choice_of_attention, has_kv_cache
from zerodrift.models.family.rope import rope_bases

ROUNDINGS = {"bf16": "bfloat16", "fp16 or TF32": "float16"}
"""Foreign kernels round elsewhere than ours: their bf16 cannot be predicted, only its size can."""
FOUR_BIT_GROUPS = (16, 32, 64, 128)
"""Weights that share a scale in the formats that are common."""


def path_variants(model: Any) -> dict[str, Variant]:
    """What may have been computed differently, for this model."""
    found = {
        "bf16-head": Variant(
            "path/head-precision", "head in bf16", lambda m: variants.with_head(m, torch.bfloat16)
        ),
        "bf16-body": Variant(
            "path/body-precision", "body and head in bf16", lambda m: variants.in_dtype(m, torch.bfloat16)
        ),
        "fp16-body": Variant(
            "path/body-precision", "body and head in fp16", lambda m: variants.in_dtype(m, torch.float16)
        ),
        "int8": Variant(
            "path/weight-quantisation", "weights in 8 bits", lambda m: variants.with_quantised_weights(m, 8)
        ),
        "q4-0": Variant("path/weight-quantisation", "weights in GGUF's Q4_0", variants.with_q4_0_weights),
    }
    if has_a_choice_of_attention(model):
        found["fp8-kv"] = Variant("path/kv-precision", "keys and values in fp8", variants.with_fp8_kv)
        found |= leak_variants()
        for message, heads in wrong_groupings(model).items():
            change = AttentionChange(heads=heads)
            found[message] = Variant("path/kv-heads", message, partial(with_attention, change=change))
    for group in FOUR_BIT_GROUPS:
        if variants.has_groups_of(model, group):
            found[f"int4-{group}"] = Variant(
                "path/weight-quantisation",
                f"weights in 4 bits, {group} to a scale",
                partial(variants.with_quantised_weights, bits=4, group=group),
            )
    if window := getattr(model.config, "sliding_window", None):
        found["no-window"] = Variant("path/window", "sliding window ignored", variants.without_window)
        for other in (window // 2, window - 1, window + 1, window * 2):
            found[f"window-{other}"] = Variant(
                "path/window",
                f"sliding window of {other} instead of {window}",
                partial(variants.with_window, width=other),
            )
    return found


def not_asked(model: Any) -> tuple[str, ...]:
    """Changes of path that this model has no parts for."""
    missing = (
        [] if has_a_choice_of_attention(model) else ["keys and values in fp8", "masks", "groups of KV heads"]
    )
    if not has_kv_cache(model):
        missing.append("prompts in chunks")
    return tuple(missing if rope_bases(model.config) else [*missing, "rotary positions"])


class Paths:
    """Forwards of one model by name: vanilla, the grid, and what fits add while they look for a value."""

    def __init__(self, model: Any) -> None:
        """Nothing is built yet; a changed model lives only while it is used."""
        self.model = model
        self.grid = path_variants(model)
        self.forwards: dict[str, Forward] = {VANILLA: vanilla_forward(model)}
        for name, variant in self.grid.items():
            self.add(name, variant)

    def add(self, name: str, variant: Variant) -> str:
        """The name, under which evaluators now find the forward."""
        if name not in self.forwards:
            self.forwards[name] = _variant_forward(self.model, variant)
        return name


def path_hypotheses(explanation: Explanation, found: Mapping[str, Variant]) -> Iterator[Hypothesis]:
    """Every change of path that can be made to `explanation`."""
    if explanation.forward == VANILLA:
        for name, variant in found.items():
            yield Hypothesis(
                variant.cause, variant.message, msgspec.structs.replace(explanation, forward=name), 1
            )
    if explanation.rounding == ROUNDED_AS_EXPECTED:
        for name, dtype in ROUNDINGS.items():
            changed = msgspec.structs.replace(explanation, rounding=dtype)
            message = f"Δ has the size of {name} rounding, token by token"
            yield Hypothesis("path/body-precision", message, changed, 1)


def vanilla_forward(model: Any) -> Forward:
    """The model as it is."""
    return _forward(Teacher(model, layout=Layout.PADDED))


def _forward(teacher: Teacher) -> Forward:
    def forward(
        sequences: Sequence[Sequence[int]], starts: Sequence[int], prompts: Sequence[int]
    ) -> list[torch.Tensor]:
        found = dict(teacher.shortest_first(sequences, starts))
        return [found[index] for index in range(len(sequences))]

    return forward


def _variant_forward(model: Any, variant: Variant) -> Forward:
    def forward(
        sequences: Sequence[Sequence[int]], starts: Sequence[int], prompts: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        changed = variant.build(model)
        if variant.alone is not None:
            each = zip(sequences, prompts, starts, strict=True)
            return [variant.alone(changed, *one) for one in each]
        attention = changed.config._attn_implementation  # noqa: SLF001 - the setter has no public getter
        teacher = Teacher(changed, layout=Layout.PADDED, attention=attention, positions=variant.positions)
        return _forward(teacher)(sequences, starts, prompts)

    return forward
