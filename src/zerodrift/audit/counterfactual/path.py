"""Hypotheses about the path: the logits were computed another way. Each costs one forward over the cases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from zerodrift.audit.counterfactual.account import VANILLA, Account, Hypothesis
from zerodrift.audit.counterfactual.evaluate import Forward
from zerodrift.backends import variants
from zerodrift.backends.teacher import Layout, Teacher


class Variant(NamedTuple):
    """A way of computing logits, and the cause it stands for."""

    cause: str
    says: str
    build: Callable[[Any], Any]
    """Model to changed model; run only if the hypothesis is tried."""
    position_jump: int | None = None
    """Positions from here on are one too high; None: positions are right."""


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
        "int4": Variant(
            "path/weight-quantisation", "weights in 4 bits", lambda m: variants.with_quantised_weights(m, 4)
        ),
        "int8": Variant(
            "path/weight-quantisation", "weights in 8 bits", lambda m: variants.with_quantised_weights(m, 8)
        ),
        "fp8-kv": Variant("path/kv-precision", "keys and values in fp8", variants.with_fp8_kv),
    }
    if (parameters := getattr(model.config, "rope_parameters", None)) is not None:
        theta = float(parameters["rope_theta"])
        for other in sorted({theta / 10, theta / 2, theta * 2, theta * 10, 10_000.0, 500_000.0, 1e6} - {theta}):
            found[f"rope-{other:g}"] = Variant(
                "path/rope",
                f"rotary base {other:g} instead of {theta:g}",
                lambda m, other=other: variants.with_rope_theta(m, other),
            )
    if getattr(model.config, "sliding_window", None):
        found["no-window"] = Variant("path/window", "sliding window ignored", variants.without_window)
    for boundary in (16, 32, 64, 128, 256, 512):
        found[f"jump-{boundary}"] = Variant(
            "path/context-boundary",
            f"positions from {boundary} on are one too high",
            lambda m: m,
            boundary,
        )
    return found


def path_forwards(model: Any, found: Mapping[str, Variant]) -> dict[str, Forward]:
    """Vanilla and every variant as a forward; a changed model lives only while it is used."""
    forwards: dict[str, Forward] = {VANILLA: _forward(Teacher(model, layout=Layout.PADDED))}
    for name, variant in found.items():
        forwards[name] = _variant_forward(model, variant)
    return forwards


def path_hypotheses(account: Account, found: Mapping[str, Variant]) -> Iterator[Hypothesis]:
    """Every change of path that can be made to `account`."""
    if account.forward != VANILLA:
        return
    for name, variant in found.items():
        yield Hypothesis(variant.cause, variant.says, msgspec.structs.replace(account, forward=name), 1)


def _forward(teacher: Teacher) -> Forward:
    return lambda sequences, starts: list(teacher.logits(sequences, starts))


def _variant_forward(model: Any, variant: Variant) -> Forward:
    def forward(sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[torch.Tensor]:
        changed = variant.build(model)
        if variant.position_jump is not None:
            return [
                _jumped(changed, ids, start, variant.position_jump)
                for ids, start in zip(sequences, starts, strict=True)
            ]
        attention = changed.config._attn_implementation
        teacher = Teacher(changed, layout=Layout.PADDED, attention=attention)
        return list(teacher.logits(sequences, starts))

    return forward


@torch.no_grad()
def _jumped(model: Any, ids: Sequence[int], start: int, boundary: int) -> torch.Tensor:
    positions = torch.arange(len(ids))
    positions = positions + (positions >= boundary).long()
    output = model(torch.tensor([list(ids)]), position_ids=positions[None], use_cache=False)
    rows: torch.Tensor = output.logits[0, start - 1 : -1]
    return rows
