"""Tiny models with random weights, the same on every machine, in which every tensor matters to every logit.

Built for finding drift: attention is sharp enough that a wrong position, window or cache shows, norms and biases
are away from their neutral values so that dropping one shows, and the head is scaled so that next-token entropy
is 1 to 2 nats, where sampled text neither repeats itself nor is noise.

Weights are uniform, not normal: `torch.rand` makes them by exact integer steps, so their bits do not depend on the
processor's vector width as those of `torch.randn` do. Each tensor is drawn from its own seed, a digest of its name,
so they do not depend on the order in which a version of `transformers` lists them either.
"""

import hashlib
import math
from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from zerodrift.models.family.base import Family
from zerodrift.models.family.registry import FAMILIES
from zerodrift.models.testbed_config import CONFIGS

EXPERTS = {"experts_implementation": "eager"}
"""transformers' plain loop over experts: its grouped product has no fp64, in which tiny references compute."""

# Standard deviation of each projection's output for a normalised input. Queries and keys at 1.2 give attention
# scores a deviation of 1.4: an attention entropy near 3.5 nats where 4.5 would be uniform.
_GAINS: Mapping[str, float] = {
    "q_proj.weight": 1.2,
    "k_proj.weight": 1.2,
    "v_proj.weight": 1.0,
    "o_proj.weight": 1.0,
    "gate_proj.weight": 1.0,
    "up_proj.weight": 1.0,
    "down_proj.weight": 1.0,
    "lm_head.weight": 1.0,
    "experts.gate_up_proj": 1.0,
    "experts.down_proj": 1.0,
    # Logits of experts with a deviation of 2: which two are chosen is seldom a matter of rounding.
    "mlp.gate.weight": 2.0,
}
_BIAS_DEVIATION = 0.5
_NORM_SPREAD = 0.3
"""Norm weights lie within this fraction of their centre."""
_QUERY_KEY_NORM = 1.2
"""Centre of per-head norms, which replace the gains of q_proj and k_proj."""
_EMBEDDING_DEVIATION = 1.0

# Centre of the final norm, found by bisection so that mean entropy is 1.5 nats on words drawn from the tokenizer's
# text (tests/unit/models/test_testbed.py measures it).
_FINAL_NORM: Mapping[str, float] = {
    "llama": 0.315,
    "qwen2": 4.82,
    "qwen3": 4.88,
    "mistral": 5.06,
    "gemma3": 5.26,
    "qwen3-moe": 4.95,
}


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The built-in model `name`, in eval mode. No global random state is read or changed."""
    config = AutoConfig.for_model(**CONFIGS[name])
    # The vendor's own initialisation draws from the global generator; its values are overwritten below.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **EXPERTS)
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            parameter.copy_(_weights(name, tensor_name, parameter.shape))
    return model.eval()


def _weights(model_name: str, tensor_name: str, shape: torch.Size) -> torch.Tensor:
    seed = hashlib.sha256(f"{model_name}/{tensor_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:4], "little"))
    # In [-1, 1), on a grid of 2**-23: exact in float32 on every machine.
    uniform = torch.rand(shape, generator=generator) * 2 - 1
    if "norm" in tensor_name:
        gain = (uniform * _NORM_SPREAD + 1) * _norm_centre(model_name, tensor_name, shape)
        return gain - _family(model_name).norm_offset
    # A uniform variable in [-a, a) has deviation a / sqrt(3).
    return uniform * (math.sqrt(3) * _deviation(model_name, tensor_name, shape))


def _norm_centre(model_name: str, tensor_name: str, shape: torch.Size) -> torch.Tensor | float:
    if tensor_name == "model.norm.weight":
        # A tied head scores the token just read by its own squared length, and would repeat it with probability
        # 0.8. Alternating signs cancel that length and leave all else alone.
        signs = 1.0 - 2.0 * (torch.arange(*shape) % 2) if CONFIGS[model_name]["tie_word_embeddings"] else 1.0
        return signs * _FINAL_NORM[model_name]
    return _QUERY_KEY_NORM if tensor_name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0


def _deviation(model_name: str, tensor_name: str, shape: torch.Size) -> float:
    if tensor_name.endswith("bias"):
        return _BIAS_DEVIATION
    if tensor_name == "model.embed_tokens.weight":
        # Before it is multiplied by the root of the hidden size, where the family does that.
        return _EMBEDDING_DEVIATION / (math.sqrt(shape[-1]) if _family(model_name).embedding_scaled else 1)
    gain = next(gain for suffix, gain in _GAINS.items() if tensor_name.endswith(suffix))
    return gain / math.sqrt(shape[-1])


def _family(model_name: str) -> Family:
    return FAMILIES[CONFIGS[model_name]["model_type"]]
