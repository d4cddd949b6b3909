"""A family's file is held against the model before anything relies on it: what it says wrongly is refused by its place."""

from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerodrift import exact
from zerodrift.core.errors import UnsupportedModel
from zerodrift.models.family.base import AttentionPlaces, ExpertPlaces, Family, Fused, MlpPlaces
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import FAMILIES, family_named, family_of

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXTRA: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "query_pre_attn_scalar": 5,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 5.0,
    },
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "mistral": {"sliding_window": 4},
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_head": 4, "n_layer": 2},
}
EXACT = sorted(family.model_type for family in FAMILIES.values() if family.exact_on)


def built(model_type: str, **changes: Any) -> Any:
    sizes = {} if model_type == "gpt2" else SIZES
    options = {**sizes, **EXTRA.get(model_type, {}), "vocab_size": 40, **changes}
    config = AutoConfig.for_model(model_type, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.4 if parameter.dim() == 1 else 0.0, 1.2 / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("model_type", EXACT)
def test_every_family_describes_its_own_models(model_type: str) -> None:
    exact.prepare(built(model_type))


def attention(family: Family, **changes: Any) -> dict[str, Any]:
    return {"attention": msgspec.structs.replace(family.attention, **changes)}


QKVO = dict(AttentionPlaces().projections)
GATED = dict(MlpPlaces().projections)
LAYER = "model.layers.0"
WRONG: list[tuple[str, Any, str]] = [
    ("gemma3_text", lambda _: {"norm_offset": 0.0}, "model.norm does not compute"),
    ("llama", lambda _: {"norm_offset": 1.0}, "model.norm does not compute"),
    ("gemma3_text", lambda f: attention(f, scale_setting=None), f"{LAYER}.self_attn does not compute"),
    ("gemma3_text", lambda f: attention(f, window="none"), f"{LAYER}.self_attn has a window of 4"),
    # Mistral's attention keeps no window as an attribute.
    ("mistral", lambda f: attention(f, window="none"), f"{LAYER}.self_attn has a window of 4"),
    ("llama", lambda f: attention(f, window="every-layer"), "model.layers.*.self_attn is described by"),
    ("llama", lambda f: attention(f, window="layer-types"), "model.layers.*.self_attn is described by"),
    (
        "gemma3_text",
        lambda f: attention(f, scale_setting="query_pre_attn_scaler"),
        "model.layers.*.self_attn is described by",
    ),
    (
        "gemma3_text",
        lambda f: attention(f, scale_setting="attn_logit_softcapping"),
        "model.layers.*.self_attn is described with",
    ),
    ("qwen3", lambda _: {"logit_cap_setting": "final_softcap"}, "lm_head is described by"),
    ("llama", lambda _: {"exact_on": frozenset({"cuda"})}, "exact mode on the CPU does not run Llama"),
    ("qwen3", lambda f: attention(f, norms={"q": "q_norm"}), f"{LAYER}.self_attn.k_norm is a Qwen3RMSNorm"),
    (
        "llama",
        lambda f: attention(f, projections={**QKVO, "k": "v_proj", "v": "k_proj"}),
        f"{LAYER}.self_attn does not compute",
    ),
    (
        "llama",
        lambda f: attention(f, projections={**QKVO, "k": "q_proj", "q": "k_proj"}),
        f"{LAYER}.self_attn does not compute",
    ),
    (
        "llama",
        lambda f: attention(f, projections={**QKVO, "q": "query"}),
        f"{LAYER}.self_attn.q_proj is a Linear",
    ),
    (
        "mistral",
        lambda _: {"mlp": MlpPlaces(projections={**GATED, "gate": "up_proj", "up": "gate_proj"})},
        f"{LAYER}.mlp does not compute",
    ),
    ("qwen2", lambda _: {"mlp": MlpPlaces(activation="activation")}, f"{LAYER}.mlp.act_fn is a SiLU"),
    (
        "qwen2",
        lambda _: {"norms": ("input_layernorm",)},
        f"{LAYER}.post_attention_layernorm is a Qwen2RMSNorm",
    ),
    (
        "qwen2",
        lambda f: {"norms": (*f.norms, "third_norm")},
        f"{LAYER}.third_norm is missing",
    ),
    ("llama", lambda _: {"rotary": "rope"}, "model.rotary_emb is a LlamaRotaryEmbedding"),
    ("llama", lambda _: {"head": "head"}, "lm_head is a Linear"),
    ("gemma3_text", lambda _: {"embedding_scaled": False}, "model.embed_tokens is a Gemma3TextScaled"),
    ("gemma3_text", lambda _: {"logit_cap_setting": None}, "final_logit_softcapping is 5.0"),
    ("gemma3_text", lambda _: {"activation_setting": "initializer_range"}, "initializer_range is 0.02"),
    ("qwen3_moe", lambda _: {"sparse": None}, f"{LAYER}.mlp is a Qwen3MoeSparseMoeBlock"),
    (
        "qwen3_moe",
        lambda _: {"experts": ExpertPlaces(gate_up=Fused("gate_up_proj", ("up", "gate")))},
        f"{LAYER}.mlp does not compute",
    ),
    ("qwen3_moe", lambda _: {"experts": ExpertPlaces(router="mlp.router")}, f"{LAYER}.mlp.gate is a"),
]


@pytest.mark.parametrize(("model_type", "change", "place"), WRONG, ids=[place for _, _, place in WRONG])
def test_a_wrong_description_is_refused_by_the_name_of_the_part(
    model_type: str, change: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = msgspec.structs.replace(FAMILIES[model_type], **change(FAMILIES[model_type]))
    monkeypatch.setitem(FAMILIES, model_type, wrong)  # type: ignore[arg-type]
    model = built(model_type)
    with pytest.raises(UnsupportedModel) as error:
        exact.prepare(model)
    assert str(error.value).startswith(place)
    # Refused before anything was exchanged.
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model, "exact_state")


def test_the_layers_that_refute_a_description_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Described alike, the second layer would go by what the first one showed."""
    family = FAMILIES["gemma3_text"]
    types = {"layer_types": ["full_attention", "sliding_attention"]}
    exact.prepare(built("gemma3_text", **types))
    wrong = msgspec.structs.replace(family, **attention(family, window="none"))
    monkeypatch.setitem(FAMILIES, "gemma3_text", wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel) as error:
        exact.prepare(built("gemma3_text", **types))
    assert str(error.value).startswith("model.layers.1.self_attn has a window of 4")


def test_a_cap_that_transformers_does_not_apply_is_refused() -> None:
    model = built("gemma3_text")
    model.config.attn_logit_softcapping = 50.0
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping is 50"):
        exact.prepare(model)


def test_a_family_is_run_only_on_devices_where_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("gemma3_text")
    elsewhere = msgspec.structs.replace(FAMILIES["gemma3_text"], exact_on=frozenset({"cpu"}))
    monkeypatch.setitem(FAMILIES, "gemma3_text", elsewhere)  # type: ignore[arg-type]
    # No GPU here: the parameters only say that they are on one.
    monkeypatch.setattr(
        type(model), "parameters", lambda _: iter([torch.empty(1, device="meta").as_subclass(OnCuda)])
    )
    with pytest.raises(UnsupportedModel, match="on CUDA does not run Gemma 3 yet"):
        exact.prepare(model)


class OnCuda(torch.Tensor):
    device = torch.device("cuda", 0)


@pytest.mark.parametrize("model_type", [*EXACT, "gpt2"])
@pytest.mark.parametrize("role", ["q", "k", "v", "o", "gate", "up", "down"])
def test_projections_are_views_of_the_weights(model_type: str, role: str) -> None:
    model = built(model_type)
    parts = ModelParts(model)
    found = parts.projection(1, role)
    if (model_type, role) == ("gpt2", "gate"):
        assert found == ()
        return
    with torch.no_grad():
        before = sum(float(tensor.abs().sum()) for tensor in model.parameters())
        removed = sum(float(tensor.abs().sum()) for tensor in found)
        for tensor in found:
            tensor.zero_()
        after = sum(float(tensor.abs().sum()) for tensor in model.parameters())
    assert removed > 0
    assert before - removed == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("model_type", [*EXACT, "gpt2"])
def test_tensors_are_known_by_their_names(model_type: str) -> None:
    model = built(model_type)
    family = family_of(model)
    names = list(model.state_dict())
    assert {family.layer_of(name) for name in names} == {None, 0, 1}
    assert sum(family.is_embedding(name) for name in names) == 1
    norms = [name for name in names if family.is_norm(name)]
    assert norms == [name for name in names if "norm" in name or ".ln_" in name]


@pytest.mark.parametrize(
    ("model_type", "name", "layer", "moved"),
    [
        ("llama", "model.layers.3.mlp.up_proj.weight", 3, "model.layers.7.mlp.up_proj.weight"),
        ("gpt2", "h.11.ln_1.bias", 11, "h.7.ln_1.bias"),
        ("gpt2", "transformer.h.0.ln_1.bias", 0, "transformer.h.7.ln_1.bias"),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.5.up_proj.weight",
            1,
            "model.layers.7.mlp.experts.5.up_proj.weight",
        ),
        ("unknown", "backbone.blocks.2.mixer.3.weight", 2, "backbone.blocks.7.mixer.3.weight"),
        ("unknown", "head.weight", None, "head.weight"),
    ],
)
def test_layers_of_a_checkpoint(model_type: str, name: str, layer: int | None, moved: str) -> None:
    family = family_named(model_type)
    assert family.layer_of(name) == layer
    assert family.in_layer(name, 7) == moved
