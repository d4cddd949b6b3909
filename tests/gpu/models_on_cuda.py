"""The models that scripts of this folder ask about: real shapes, few enough layers, random bf16 weights.

Qwen3-0.6B as it is. Gemma 3 1B: heads of 256, four to a kv head, windows. Qwen3-30B-A3B: its experts, eight layers of them but
for one that is dense.
"""

from typing import Any

import torch
from report import VOCAB
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig


def build(family: str = "qwen3", *, small: bool) -> Any:
    """`small` has two layers, windows that short sequences reach, and experts that fit in fp64 several times."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(_config(family, small=small), dtype=torch.bfloat16)
    if family == "qwen3-moe":
        # One expert after another by cuBLAS: the control that must differ, and the one that fp64 has.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # A deviation of 0.02 would make attention uniform, and hide what it gets wrong.
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif family != "qwen3":
                # Gains that are all 1 hide where they are rounded.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.cuda().eval()


def _config(family: str, *, small: bool) -> PreTrainedConfig:
    if family == "gemma3":
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        return Gemma3TextConfig(
            vocab_size=262_144,
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=2 if small else 26,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            query_pre_attn_scalar=256,
            layer_types=kinds[-2:] if small else (kinds * 5)[:26],
            sliding_window=128 if small else 512,
            max_position_embeddings=32_768,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            },
            tie_word_embeddings=True,
        )
    if family == "qwen3-moe":
        return Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=2 if small else 8,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=32 if small else 128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=False,
        )
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2 if small else 28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
    )
