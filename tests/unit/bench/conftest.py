from typing import Any

import pytest

from zerodrift.bench.shape import random_weights


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A vanilla model that serves a request of 512 tokens in moments."""
    return random_weights(
        {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 61,
            "max_position_embeddings": 512,
        }
    )
