"""Llama, and what is built like it: SmolLM2, Vicuna, TinyLlama."""

from zerodrift.models.family.base import Family

LLAMA = Family(name="Llama", model_type="llama", prefix="Llama", exact_on=frozenset({"cpu", "cuda"}))
