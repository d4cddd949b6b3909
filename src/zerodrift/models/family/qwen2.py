"""Qwen2 and Qwen2.5: biased queries, keys and values; upper layers may have a window."""

from zerodrift.models.family.base import AttentionPlaces, Family

QWEN2 = Family(
    name="Qwen2",
    model_type="qwen2",
    prefix="Qwen2",
    exact_on=frozenset({"cpu", "cuda"}),
    attention=AttentionPlaces(window="layer-types"),
)
