"""GPT-2: learned positions, queries, keys and values in one tensor with inputs first. Audited, not run exactly."""

from zerodrift.models.family.base import AttentionPlaces, Family, Fused, MlpPlaces

GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    prefix="GPT2",
    decoder="transformer",
    embedding="wte",
    layers="h",
    final_norm="ln_f",
    rotary=None,
    attention=AttentionPlaces(
        place="attn", projections={"o": "c_proj"}, fused=Fused("c_attn", ("q", "k", "v"), dim=-1)
    ),
    mlp=MlpPlaces(projections={"up": "c_fc", "down": "c_proj"}, activation="act"),
    norms=("ln_1", "ln_2"),
    norm_class="LayerNorm",
    activation_setting="activation_function",
)
