"""Is a model what its family's file says? Asked before anything relies on it; what differs is refused by its place.

First the module tree, without a number. Then formulas: a few rows go through a part, and must come out as the
description computes them. Shapes: R rows, H hidden size, D head size.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.activations import ACT2FN

from zerodrift.core.errors import UnsupportedModel
from zerodrift.models.family.base import Family
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import exact_families

ROWS = 2
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Share of the largest number by which a part may miss its formula; 16-bit parts round several times on the way."""
TOLERANCE_16 = 0.03
MERGE = (
    "merge the adapter (model.merge_and_unload()) and prepare what comes back, or train it with the trainer's own forward "
    "and audit that (zerodrift audit --trainer transformers:base=…,lora=…)"
)
"""Said of an adapter that is no plain LoRA on a linear."""
_LISTENING = "zerodrift_listening"


def check_tree(family: Family, model: Any) -> None:
    """Every module is where and what the family's file says, and there is no other."""
    wanted = family.classes(model.config)
    activations = set(family.activations(model.config))
    for path, module in model.named_modules():
        kind = type(module).__name__
        require_no_adapter(path, module)
        if path not in activations and wanted.get(path) != kind:
            raise UnsupportedModel(
                f"{path or 'the model'} is a {kind}, which is not known to be exact"
                + (f" ({family.name} is described with a {wanted[path]} there)" if path in wanted else "")
                + f"; exact mode runs the parts of {', '.join(exact_families('cpu'))}"
            )
        require_own_forward(path, module)
    present = {path for path, _ in model.named_modules()}
    for place in (*wanted, *activations):
        if place not in present:
            raise UnsupportedModel(
                f"{place} is missing, where {family.name} is described to have {_a(wanted.get(place, 'activation'))}"
            )
    _check_settings(family, model.config)
    setting = family.activation_setting
    name = getattr(model.config, setting, None)
    if name not in ACT2FN:
        raise UnsupportedModel(
            f"{setting} is {name!r}, where {family.name} is described to name its activation"
        )
    for place in activations:
        if type(model.get_submodule(place)) is not type(ACT2FN[name]):
            raise UnsupportedModel(
                f"{place} is a {type(model.get_submodule(place)).__name__}, but {setting} is {name!r}"
            )


def require_no_adapter(path: str, module: Any) -> None:
    """PEFT calls its own modules by the names of those that they wrap."""
    if type(module).__module__.startswith("peft."):
        raise UnsupportedModel(
            f"{path or 'the model'} is a {type(module).__name__} of PEFT, which exact mode does not run; {MERGE}"
        )


def require_own_forward(path: str, module: Any, known: tuple[str, ...] = ()) -> None:
    """What a module computes is what its class says: nothing on the instance stands before or around that.

    `known` are the packages whose hooks change no number.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001  no public getter
    instead = {
        "a forward of its own (accelerate and others set one)": "forward" in vars(module),
        "a compiled forward": getattr(module, "_compiled_call_impl", None) is not None,
        "forward hooks": any(not str(getattr(hook, "__module__", "")).startswith(known) for hook in hooks)
        if known
        else bool(hooks),
    }
    if found := [what for what, there in instead.items() if there]:
        raise UnsupportedModel(
            f"{path or 'the model'} has {found[0]}, so that its class does not say what it computes; exact mode needs the "
            "model as transformers made it: take that off first"
        )


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0].lower() in "aeiou" else f"a {kind}"


def _check_settings(family: Family, config: Any) -> None:
    for name in family.ignored_settings:
        if getattr(config, name, None) is not None:
            raise UnsupportedModel(
                f"{name} is {getattr(config, name)}, which transformers does not apply to {family.name} while an engine "
                "may: there is no one right result; unset it"
            )
    for name, value in config.to_dict().items():
        if "softcap" in name and value is not None and name != family.logit_cap_setting:
            raise UnsupportedModel(f"{name} is {value}, but {family.name} is described without it")


@torch.no_grad()
def check_formulas(family: Family, model: Any) -> None:
    """What the parts compute is what the family's file says they compute."""
    parts = ModelParts(model, family)
    _check_embedding(family, parts)
    _check_head(family, parts)
    _check_norm(family, parts.final_norm, f"{family.below_decoder(family.final_norm)}", model.config)
    # Every layer: those that a wrong description takes for alike are those that would refute it. 2 rows each.
    kinds = zip(family.windows(model.config), family.sparse_layers(model.config), strict=True)
    for index, kind in enumerate(kinds):
        _check_layer(parts, index, *kind)


def _check_layer(parts: ModelParts, index: int, window: int | None, sparse: bool) -> None:  # noqa: FBT001
    family, config, layer = parts.family, parts.model.config, parts.layers[index]
    place = f"{family.below_decoder(family.layers)}.{index}"
    for norm in family.norms:
        _check_norm(family, layer.get_submodule(norm), f"{place}.{norm}", config)
    attention = parts.attention(index)
    inside = f"{place}.{family.attention.place}" if family.attention is not None else place
    if family.attention is not None:
        for norm in family.attention.norms.values():
            _check_norm(family, attention.get_submodule(norm), f"{inside}.{norm}", config)
    rows = _rows(config.hidden_size, parts.embedding.weight)
    _check_window(family, attention, rows, config, (inside, window))
    _hold(inside, _attended(family, attention, rows, config), _expected_attention(parts, index, rows))
    if sparse and family.experts is not None:
        block = layer.get_submodule(family.experts.block)
        _hold(f"{place}.{family.experts.block}", block(rows[None])[0], _expected_experts(parts, index, rows))
    elif family.mlp is not None:
        mlp = layer.get_submodule(family.mlp.place)
        gate, up, down = (mlp.get_submodule(family.mlp.projections[role]) for role in ("gate", "up", "down"))
        activation = mlp.get_submodule(str(family.mlp.activation))
        _hold(f"{place}.{family.mlp.place}", mlp(rows), down(activation(gate(rows)) * up(rows)))


def _check_window(
    family: Family, attention: Any, rows_RH: torch.Tensor, config: Any, described: tuple[str, int | None]
) -> None:
    """What the attention asks the interface of transformers for: not every module keeps it as an attribute (Mistral)."""
    asked: list[int | None] = []

    def listening(_: Any, q_BHRD: torch.Tensor, *__: Any, **options: Any) -> tuple[torch.Tensor, None]:
        asked.append(options.get("sliding_window"))
        return q_BHRD.transpose(1, 2), None

    before = config._attn_implementation  # noqa: SLF001  no public getter
    AttentionInterface.register(_LISTENING, listening)
    config._attn_implementation = _LISTENING  # noqa: SLF001  the setter of models wants a mask function, too
    try:
        _attended(family, attention, rows_RH, config)
    finally:
        config._attn_implementation = before  # noqa: SLF001
    place, window = described
    if asked != [window]:
        found = asked[0] if asked else "an unknown size, outside of the attention interface of transformers"
        raise UnsupportedModel(
            f"{place} has a window of {found}, but {family.name} is described with {window}"
        )


def _check_embedding(family: Family, parts: ModelParts) -> None:
    ids = torch.arange(ROWS, device=parts.embedding.weight.device)
    scale = family.embedding_scale(parts.model.config)
    _hold(
        f"{family.below_decoder(family.embedding)}", parts.embedding(ids), parts.embedding.weight[ids] * scale
    )


def _check_head(family: Family, parts: ModelParts) -> None:
    """The decoder's rows, the head and a cap are all that logits are made of: exact mode calls these one by one."""
    ids_1R = torch.arange(ROWS, device=parts.embedding.weight.device)[None]
    model = parts.model
    hidden_RH = model.get_submodule(str(family.decoder))(input_ids=ids_1R, use_cache=False).last_hidden_state[
        0
    ]
    logits_RV = model.get_submodule(str(family.head))(hidden_RH)
    if (cap := family.logit_cap(model.config)) is not None:
        logits_RV = torch.tanh(logits_RV / cap) * cap
    _hold(str(family.head), model(input_ids=ids_1R, use_cache=False).logits[0], logits_RV)


def _check_norm(family: Family, norm: Any, place: str, config: Any) -> None:
    x = _rows(len(norm.weight), norm.weight)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    _hold(place, norm(x), normed * (family.norm_offset + norm.weight.double()))


def _attended(family: Family, attention: Any, rows_RH: torch.Tensor, config: Any) -> torch.Tensor:
    """The last row, where both rows are at position 0: no rotation, and no mask."""
    cosines = rows_RH.new_ones(1, ROWS, family.head_dim(config))
    output = attention(
        hidden_states=rows_RH[None],
        position_embeddings=(cosines, torch.zeros_like(cosines)),
        attention_mask=None,
    )
    found: torch.Tensor = output[0][0, -1]
    return found


def _expected_attention(parts: ModelParts, index: int, rows_RH: torch.Tensor) -> torch.Tensor:
    family, config = parts.family, parts.model.config
    places, attention, size = family.attention, parts.attention(index), family.head_dim(config)
    assert places is not None, "exact families have attention"
    made = {
        role: attention.get_submodule(places.projections[role])(rows_RH).view(ROWS, -1, size)
        for role in "qkv"
    }
    for role, norm in places.norms.items():
        made[role] = attention.get_submodule(norm)(made[role])
    groups = made["q"].shape[1] // made["k"].shape[1]
    q_HD, k_RHD, v_RHD = (
        made["q"][-1].double(),
        *(made[role].double().repeat_interleave(groups, dim=1) for role in "kv"),
    )
    weights_RH = (torch.einsum("hd,rhd->rh", q_HD, k_RHD) * family.scale(config)).softmax(0)
    out_HD = torch.einsum("rh,rhd->hd", weights_RH, v_RHD)
    output = attention.get_submodule(places.projections["o"])
    expected: torch.Tensor = output(out_HD.flatten()[None].to(rows_RH.dtype))[0]
    return expected


def _expected_experts(parts: ModelParts, index: int, rows_RH: torch.Tensor) -> torch.Tensor:
    family, config, layer = parts.family, parts.model.config, parts.layers[index]
    assert family.experts is not None, "asked of layers with experts"
    router = layer.get_submodule(family.experts.router)
    activation = layer.get_submodule(f"{family.experts.place}.{family.experts.activation}")
    (gate,), (up,), (down,) = (parts.projection(index, role) for role in ("gate", "up", "down"))
    # By the very product and softmax that transformers has: in 16 bits the last experts of a row are close together.
    logits_RE = torch.nn.functional.linear(rows_RH, router.weight)
    shares, chosen = logits_RE.softmax(-1, dtype=torch.float32).topk(config.num_experts_per_tok)
    if config.norm_topk_prob:
        shares = shares / shares.sum(-1, keepdim=True)
    out_RH = torch.zeros_like(rows_RH, dtype=torch.float64)
    for row, x_H in enumerate(rows_RH.double()):
        for share, expert in zip(shares[row], chosen[row].tolist(), strict=True):
            own = [part[expert].double() for part in (gate, up, down)]
            out_RH[row] += share * (own[2] @ (activation(own[0] @ x_H) * (own[1] @ x_H)))
    return out_RH


def _rows(columns: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    return torch.randn(ROWS, columns, generator=generator).to(like.device, like.dtype)


def _hold(place: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Weights that are not finite show nothing, and are refused elsewhere."""
    wide, wanted = found.double(), expected.double()
    share = TOLERANCE.get(found.dtype, TOLERANCE_16)
    if bool((wide - wanted).abs().max() > share * wanted.abs().max()):
        raise UnsupportedModel(
            f"{place} does not compute what its family's file says: rows that go through it come out "
            f"{float((wide - wanted).abs().max()):.2g} away, where the largest number is "
            f"{float(wanted.abs().max()):.2g}; a wrong description cannot be run exactly"
        )
