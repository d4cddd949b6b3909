"""Scaled rotary frequencies, at 50 to 200 % of the trained length: exact as everything else, and vanilla's numbers."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift import exact
from zerodrift.core.errors import UnsupportedModel
from zerodrift.exact.verification import Schedule, alone, differing_rows, packed, paged

TRAINED = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}


def build(rope_type: str) -> Any:
    scaled = rope_type in ("yarn", "llama3")
    config = AutoConfig.for_model(
        "llama",
        hidden_size=64,
        intermediate_size=130,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=97,
        max_position_embeddings=2 * TRAINED if scaled else TRAINED,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10_000.0, **SCALINGS.get(rope_type, {})},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


LENGTHS = (TRAINED // 2, TRAINED, 80, 96, 2 * TRAINED)


@pytest.mark.parametrize(
    ("rope_type", "length"),
    [
        (rope_type, length)
        for rope_type in SCALINGS
        for length in LENGTHS
        if rope_type != "dynamic" or length <= TRAINED
    ],
)
def test_scaled_frequencies(rope_type: str, length: int) -> None:
    ids = torch.randint(97, (length,), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = build(rope_type)(ids[None]).logits[0]
        model = exact.prepare(build(rope_type))
        sequences = [ids.tolist(), ids.tolist()[:40], ids.tolist()[:1]]
        whole = alone(model, sequences)
        found = exact.head(model, whole[0])
        assert float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) <= 1e-4
        assert differing_rows(whole, packed(model, sequences)) == 0
        assert differing_rows(whole, paged(model, sequences, Schedule(length, 16))) == 0


def test_vanilla_dynamic_frequencies_depend_on_the_neighbours() -> None:
    """Why they are refused beyond the trained length: in one vanilla forward, a long row changes a short one's numbers."""
    model = build("dynamic")
    ids = torch.randint(97, (2, 2 * TRAINED), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        short = model(ids[:1, :20]).logits[0]
        beside = model(ids).logits[0, :20]
    assert float((short - beside).abs().max()) > 1e-3


def test_dynamic_frequencies_beyond_the_trained_length_are_refused() -> None:
    model = exact.prepare(build("dynamic"))
    ids = torch.randint(97, (TRAINED + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    assert len(alone(model, [ids[:-1]])[0]) == TRAINED
    for run in (alone, packed):
        with pytest.raises(UnsupportedModel):
            run(model, [ids])
    with pytest.raises(UnsupportedModel):
        paged(model, [ids], Schedule(TRAINED, 16))


def test_restore_gives_the_dynamic_module_back() -> None:
    model = build("dynamic")
    kind = type(model.model.rotary_emb)
    exact.restore(exact.prepare(model))
    assert type(model.model.rotary_emb) is kind
    assert not hasattr(model.model.rotary_emb, "exact_original")


def test_other_scalings_are_refused() -> None:
    model = build("default")
    model.config.rope_parameters["rope_type"] = "longrope"
    with pytest.raises(UnsupportedModel, match="longrope"):
        exact.prepare(model)
