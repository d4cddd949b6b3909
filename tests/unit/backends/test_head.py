"""The head by itself is the model's own last step, with all that the model does there."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift.backends.head import own_head

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    shape = {} if kind == "gpt2" else TINY
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **options)).eval()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gemma2", {"final_logit_softcapping": 0.1}),
        ("granite", {"logits_scaling": 7.0}),
        ("cohere", {"logit_scale": 0.3}),
        # Layers that return more than hidden states.
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}),
        (
            "gpt2",
            {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
        ),
    ],
)
def test_rows_are_those_of_the_whole_model(kind, options):
    model, ids_BL = build(kind, **options), torch.tensor([[5, 6, 7, 8, 9, 10]])
    modules = dict(model.named_modules())
    with torch.no_grad():
        expected_TV = model(ids_BL).logits[0]
        output = model.base_model(ids_BL)
    head = own_head(model, type(output))
    found_TV = torch.cat([head(output.last_hidden_state[0, rows]) for rows in (slice(2), slice(2, 6))])
    assert torch.allclose(found_TV, expected_TV, rtol=0, atol=1e-6)
    assert not found_TV.requires_grad
    assert dict(model.named_modules()) == modules, "the model itself was changed"
