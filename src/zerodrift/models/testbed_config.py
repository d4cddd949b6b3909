"""Which tiny models are built in, as the `config.json` that each would have. Data only, and torch-free.

Together they cover what engines get wrong: grouped queries and a tied head (llama), biased projections (qwen2),
per-head norms with an untied head (qwen3), a window shorter than the context (mistral), local beside global layers
and gains of 1 + w (gemma3), experts (qwen3-moe). All have heads of 64, the smallest that vLLM's CPU attention takes,
and the vocabulary of the tokenizer in `tokenizer_testbed`.
"""

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 512
CONTEXT_LENGTH = 1024
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(4)

_SHARED: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT_LENGTH,
    "hidden_act": "silu",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        **_SHARED,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
    },
    "qwen2": {
        **_SHARED,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "qwen3": {
        **_SHARED,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "mistral": {
        **_SHARED,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "sliding_window": 64,
    },
    "gemma3": {
        **_SHARED,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {
        **_SHARED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
}
