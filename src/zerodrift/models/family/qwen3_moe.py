"""Qwen3-MoE: Qwen3 with a router and experts in the place of most dense parts."""

from typing import Any

from zerodrift.models.family.base import AttentionPlaces, ExpertPlaces, Family


def _sparse(config: Any) -> tuple[bool, ...]:
    return tuple(
        index not in config.mlp_only_layers
        and config.num_experts > 0
        and (index + 1) % config.decoder_sparse_step == 0
        for index in range(config.num_hidden_layers)
    )


QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    prefix="Qwen3Moe",
    exact_on=frozenset({"cpu", "cuda"}),
    attention=AttentionPlaces(norms={"q": "q_norm", "k": "k_norm"}, window="every-layer"),
    experts=ExpertPlaces(),
    sparse=_sparse,
)
