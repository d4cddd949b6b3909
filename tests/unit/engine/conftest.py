from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift import models
from zerodrift.engine.engine import Engine
from zerodrift.models.testbed_config import CONFIGS


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A random model with 61 tokens and a context of 96: a step takes milliseconds."""
    config = {
        **CONFIGS["qwen3"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 61,
        "num_hidden_layers": 2,
        "max_position_embeddings": 96,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 2 / weight.shape[-1] ** 0.5)
    return model


@pytest.fixture
def engine_of(tiny: Any) -> Callable[..., Engine]:
    """An engine on the tiny model, with settings."""
    return lambda **settings: Engine(tiny, **{"num_blocks": 64, "block_size": 4, **settings})


@pytest.fixture
def engine(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of()


@pytest.fixture(scope="session")
def with_text() -> Engine:
    """A built-in model, which has a tokenizer."""
    return Engine("testbed:qwen3", num_blocks=512)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return models.tokenizer("testbed:qwen3")
