"""Tiny models of any family of transformers, random weights, with the vocabulary of the testbeds' tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift.models import tokenizer_testbed
from zerodrift.models.quiet import quiet
from zerodrift.models.testbed_config import EOS_ID, VOCAB_SIZE

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "openai-gpt": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "rwkv": {"hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2, "context_length": 512},
    "bloom": {"hidden_size": 64, "n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "xlnet": {"d_model": 64, "n_head": 4, "n_layer": 2, "d_inner": 96},
    "recurrent_gemma": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "attention_window_size": 64,
    },
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}
EXTRA: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": 512},
    "gemma2": {"head_dim": 16, "sliding_window": 64},
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def tiny(model_type: str, **changes: Any) -> Any:
    """A causal LM of two layers."""
    config = AutoConfig.for_model(
        model_type,
        **{**OTHERS.get(model_type, SIZES), **EXTRA.get(model_type, {}), **changes},
        vocab_size=VOCAB_SIZE,
        bos_token_id=0,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # A state-space model's own matrices have meanings that noise would break.
                if parameter.dim() > 1 and not any(word in name for word in ("A_log", "conv")):
                    parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    return model


def written(model_type: str, directory: Path) -> Path:
    """The same as a directory with a tokenizer."""
    with quiet():
        tiny(model_type).save_pretrained(directory)
        tokenizer_testbed.build().save_pretrained(directory)
    return directory
