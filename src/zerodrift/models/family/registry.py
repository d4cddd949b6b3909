"""Which family a model belongs to."""

from collections.abc import Mapping
from typing import Any

from zerodrift.models.family import generic
from zerodrift.models.family.base import Family
from zerodrift.models.family.gemma3 import GEMMA3
from zerodrift.models.family.gpt2 import GPT2
from zerodrift.models.family.llama import LLAMA
from zerodrift.models.family.mistral import MISTRAL
from zerodrift.models.family.qwen2 import QWEN2
from zerodrift.models.family.qwen3 import QWEN3
from zerodrift.models.family.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA3, QWEN3_MOE, GPT2)
}


def family_of(model: Any) -> Family:
    """The family of a transformers causal LM: one that is described here, or what its modules show."""
    return FAMILIES.get(model.config.model_type) or generic.describe(model)


def family_named(model_type: str) -> Family:
    """The family of a checkpoint of which only tensor names are at hand: what is not described here has unknown places."""
    unknown = Family(
        name=model_type, model_type=model_type, prefix="", layers=None, norms=(), attention=None, mlp=None
    )
    return FAMILIES.get(model_type, unknown)


def exact_families(device: str) -> tuple[str, ...]:
    """Names of what exact mode runs on a device."""
    return tuple(family.name for family in FAMILIES.values() if device in family.exact_on)
