"""Qwen3: a norm for each head of queries and keys."""

from zerodrift.models.family.base import AttentionPlaces, Family

QWEN3 = Family(
    name="Qwen3",
    model_type="qwen3",
    prefix="Qwen3",
    exact_on=frozenset({"cpu", "cuda"}),
    attention=AttentionPlaces(norms={"q": "q_norm", "k": "k_norm"}, window="layer-types"),
)
