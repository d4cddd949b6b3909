"""Which model is measured: the trained SmolLM2-135M where it is at hand, else random weights of its shape.

Speed does not depend on what the weights are, only on how many there are.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift import models
from zerodrift.models.smollm2 import COMPLETE, DEFAULT_DIRECTORY

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}
RANDOM = "SmolLM2's shape with random weights"


def default_directory() -> Path | None:
    """The trained weights of `make smollm2`, if they are there."""
    return DEFAULT_DIRECTORY if (DEFAULT_DIRECTORY / COMPLETE).is_file() else None


def load(spec: str | Path | None) -> Any:
    """A vanilla model in fp32: what `spec` names, or random weights of SmolLM2's shape."""
    return random_weights(SMOLLM2) if spec is None else models.load(spec)


def random_weights(config: dict[str, Any]) -> Any:
    """A model of this shape; no global random state is read or changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
