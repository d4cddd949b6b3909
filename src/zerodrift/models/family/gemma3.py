"""Gemma 3, text only: norms around every part with a gain of 1 + w, local and global layers with rotary bases of their own."""

from zerodrift.models.family.base import AttentionPlaces, Family

GEMMA3 = Family(
    name="Gemma 3",
    model_type="gemma3_text",
    prefix="Gemma3",
    exact_on=frozenset({"cpu", "cuda"}),
    decoder_class="TextModel",
    embedding_class="TextScaledWordEmbedding",
    embedding_scaled=True,
    attention=AttentionPlaces(
        norms={"q": "q_norm", "k": "k_norm"}, window="layer-types", scale_setting="query_pre_attn_scalar"
    ),
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    activation_setting="hidden_activation",
    logit_cap_setting="final_logit_softcapping",
    # transformers 5.22 keeps it in the attention module and never passes it on.
    ignored_settings=("attn_logit_softcapping",),
)
