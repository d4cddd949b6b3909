"""Mistral: every layer has the window, where there is one."""

from zerodrift.models.family.base import AttentionPlaces, Family

MISTRAL = Family(
    name="Mistral",
    model_type="mistral",
    prefix="Mistral",
    exact_on=frozenset({"cpu", "cuda"}),
    attention=AttentionPlaces(window="every-layer"),
)
