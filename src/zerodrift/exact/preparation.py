"""Make a `transformers` causal LM exact in place, and undo it.

Replaced are linears by prepacked ones, activations by safe ones, routers and experts by ones of fixed order, and
attention by blocks at absolute positions, through the attention interface of transformers. Nothing global is patched.
Where the parts are is said by the model's family (`models/family`); a model with a part that is not described, or not
as described, is refused by the name of that part.
"""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from zerodrift.core.errors import UnsupportedModel
from zerodrift.exact import interface
from zerodrift.exact.experts import (
    ExactExperts,
    ExactRouter,
    chosen,
    exchange_experts,
    exchange_router,
    give_back_experts,
)
from zerodrift.exact.fused_layers import FusedLayers, can_fuse
from zerodrift.exact.grouped_experts import ExactGroupedExperts
from zerodrift.exact.modules import (
    ExactActivation,
    ExactLinear,
    ExactNorm,
    Pack,
    exchange_norm,
    give_back_norm,
)
from zerodrift.exact.normalisation import log_softmax
from zerodrift.exact.ops.cpu.elementwise import soft_cap
from zerodrift.exact.ops.cpu.op_set import CpuOps
from zerodrift.exact.ops.interface import Parts, RowOp
from zerodrift.exact.peft_model import (
    exchange_adapters,
    lora_layers,
    of_peft,
    require_prepared,
    set_aside,
    unwrapped,
)
from zerodrift.exact.rotary import ROPE_TYPES, STATIC_ROPE_TYPES, exchange_rotary, give_back_rotary
from zerodrift.models.family.base import Family
from zerodrift.models.family.check import (
    check_formulas,
    check_tree,
    require_own_forward,
)
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import FAMILIES, exact_families
from zerodrift.models.family.rope import rope_types

_STATE = "exact_state"
_OF_FRAMEWORKS = ("torch.distributed.", "transformers.")
"""Their hooks gather weights, ask for gradients and record outputs: no number changes."""


class _Prepared(NamedTuple):
    """What a prepared model carries. A copy of the model has a copy of its own layers, over its own parameters."""

    ops: Any
    attention_before: str
    layers: FusedLayers | None


def prepare(model: Any, *, plain: frozenset[str] = frozenset()) -> Any:
    """`model` itself, exact from now on. `plain` leaves ops as torch has them: for negative controls and benches.

    A model of PEFT is prepared with its LoRA adapters in place; one that is added later, by another call.
    """
    inner = unwrapped(model)
    _require_transformers(inner)
    adapted = lora_layers(inner)
    if getattr(inner, _STATE, None) is None:
        with set_aside(inner, adapted):
            _prepare_base(inner, plain)
    exchange_adapters(adapted, ops_of(inner))
    require_untouched(inner)
    return model


def _prepare_base(model: Any, plain: frozenset[str]) -> None:
    parts = ModelParts(model, family_of_exact(model))
    ops = _ops_for(parts, plain)
    _check_numbers(parts, ops)
    before = model.config._attn_implementation  # noqa: SLF001  no public getter
    # The one that takes no mask as none, whatever the model came with.
    model.set_attn_implementation("eager")
    try:
        check_formulas(parts.family, model)
    finally:
        model.set_attn_implementation(before)
    interface.register()
    _exchange(parts, ops)
    layers = FusedLayers(parts, ops) if ops.fuses and can_fuse(parts.family) else None
    setattr(model, _STATE, _Prepared(ops, before, layers))
    model.set_attn_implementation(interface.NAME)
    try:
        ops.prove(_proof_parts(parts, ops))
    except BaseException:
        # Also a head that no kernel takes: prepared a second time, it would count as proven.
        restore(model)
        raise


def family_of_exact(model: Any) -> Family:
    """The family of a model whose every module is one that exact mode knows."""
    family = FAMILIES.get(model.config.model_type)
    if family is None or not family.exact_on:
        raise UnsupportedModel(
            f"the model is a {type(model).__name__}, which is not known to be exact; exact mode runs the parts of "
            f"{', '.join(exact_families('cpu'))}"
        )
    check_tree(family, model)
    return family


def _exchange(parts: ModelParts, ops: Any) -> None:
    """Put exact modules in the place of the model's own, by the family's description."""
    family, config = parts.family, parts.model.config
    kinds = family.classes(config)
    for place, kind in kinds.items():
        module = parts.model.get_submodule(place)
        if kind == "Linear":
            module.__class__ = ExactLinear
            module.exact_pack = Pack(ops)
        elif kind == f"{family.prefix}Attention":
            module.exact_ops = ops
        elif kind == family.prefix + family.norm_class and ops.rms_norm is not None:
            exchange_norm(module, ops, one_plus=family.norm_offset == 1)
        elif kind == f"{family.prefix}RotaryEmbedding":
            exchange_rotary(module)
        elif kind == f"{family.prefix}TopKRouter" and "router" not in ops.plain:
            exchange_router(module, ops)
        elif kind == f"{family.prefix}Experts" and "experts" not in ops.plain:
            exchange_experts(module, ops)
    for place in () if "activation" in ops.plain else family.activations(config):
        function = ops.activation(getattr(config, family.activation_setting))
        original = parts.model.get_submodule(place)
        parts.model.set_submodule(place, ExactActivation(original, function))


def restore(model: Any) -> Any:
    """`model` as it was before `prepare`: vanilla bits again, whatever was trained in between kept."""
    inner = unwrapped(model)
    state = getattr(inner, _STATE, None)
    if state is None:
        return model
    for path, module in list(inner.named_modules()):
        if type(module) is ExactLinear:
            del module.exact_pack
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, (ExactRouter, ExactExperts, ExactGroupedExperts)):
            give_back_experts(module)
        elif isinstance(module, ExactNorm):
            give_back_norm(module)
        elif hasattr(module, "exact_ops"):
            del module.exact_ops
        elif type(module).__name__ == "ExactRotary":
            give_back_rotary(module)
        elif isinstance(module, ExactActivation):
            inner.set_submodule(path, module.original[0])
    inner.set_attn_implementation(state.attention_before)
    delattr(inner, _STATE)
    return model


def freeze_weights(model: Any) -> Any:
    """`model`, to which nobody writes any more without `refresh`: its forwards need not look whether somebody did."""
    for pack in _packs(model):
        pack.frozen = True
    return model


def refresh(model: Any) -> None:
    """Forget packed weights. Needed only where a model with frozen weights was written to."""
    for pack in _packs(model):
        pack.drop()


def _packs(model: Any) -> Iterator[Pack]:
    for module in model.modules():
        if isinstance(module, (ExactLinear, ExactRouter)):
            yield module.exact_pack
        elif isinstance(module, ExactExperts):
            for packs in module.exact_packs:
                yield from packs


def _require_transformers(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"a {type(model).__name__} cannot be prepared; give a transformers model (models.load)"
        )


def require_untouched(model: Any) -> None:
    """Nobody put another adapter, a hook or another forward on a model since it was prepared. 1.5 ms for 36 layers."""
    _require_transformers(model)
    for path, module in model.named_modules():
        if of_peft(module):
            require_prepared(path, module)
        require_own_forward(path, module, _OF_FRAMEWORKS)


def ops_of(model: Any) -> Any:
    """The ops of a prepared model."""
    return _prepared(model).ops


def layers_of(model: Any) -> FusedLayers | None:
    """Its layers in fewer kernels, where its device and family have them."""
    return _prepared(model).layers


def _prepared(model: Any) -> _Prepared:
    state: _Prepared | None = getattr(model, _STATE, None)
    if state is None:
        raise UnsupportedModel("the model is not prepared; call zerodrift.exact.prepare(model) first")
    return state


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 gathers the weights of `model` when it is called."""
    return hasattr(model, "set_requires_gradient_sync")


def require_gathered(model: Any) -> None:
    """Parts of a model that FSDP2 has sharded cannot be called one by one: nothing would gather their weights."""
    if hasattr(ModelParts(model).head.weight, "placements"):
        raise UnsupportedModel(
            "the head is sharded by FSDP2, which gathers weights only where the whole model is called: take "
            "log-probabilities from zerodrift.exact.token_logprobs(model, completions), with layers and the whole model "
            "sharded, but not the head by itself"
        )


def _ops_for(parts: ModelParts, plain: frozenset[str]) -> Any:
    kinds = {parameter.device.type for parameter in parts.model.parameters()}
    if kinds == {"cpu"}:
        if "cpu" not in parts.family.exact_on:
            raise UnsupportedModel(
                f"exact mode on the CPU does not run {parts.family.name} yet; it runs {', '.join(exact_families('cpu'))} there"
            )
        return CpuOps(plain)
    if kinds == {"cuda"} and len({parameter.device for parameter in parts.model.parameters()}) == 1:
        if "cuda" not in parts.family.exact_on:
            raise UnsupportedModel(
                f"exact mode on CUDA does not run {parts.family.name} yet; it runs {', '.join(exact_families('cuda'))} "
                "there, and this model on the CPU"
            )
        # Triton comes with torch for CUDA only, and is imported only where it can run.
        return import_module("zerodrift.exact.ops.triton.op_set").CudaOps(plain)
    raise UnsupportedModel(
        f"parameters lie on {sorted(kinds)}; exact mode runs a model that is wholly on the CPU or on one GPU"
    )


def _check_numbers(parts: ModelParts, ops: Any) -> None:
    model, config, setting = parts.model, parts.model.config, parts.family.activation_setting
    if found := sorted({str(p.dtype) for p in model.parameters() if p.dtype not in ops.dtypes}):
        wanted = " or ".join(str(dtype) for dtype in ops.dtypes)
        raise UnsupportedModel(
            f"parameters are {found}; on this device exact mode computes in {wanted}: load them so "
            "(model.dtype in a configuration, dtype= of models.load and Engine)"
        )
    if ops.activation(getattr(config, setting)) is None:
        raise UnsupportedModel(f"{setting} is {getattr(config, setting)!r}, which has no exact form here")
    if config.attention_dropout:
        raise UnsupportedModel(
            f"attention_dropout is {config.attention_dropout}; a trainer that drops keys cannot agree with any engine: "
            "set it to 0"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("use_bidirectional_attention is set; exact mode is for causal models")
    for layer_type, rope in rope_types(config).items():
        if rope not in (ROPE_TYPES if not layer_type else STATIC_ROPE_TYPES):
            raise UnsupportedModel(
                f"rope_type is {rope!r}{layer_type and f' for {layer_type}'}; exact mode has {', '.join(ROPE_TYPES)}, "
                "and dynamic only where all layers share it"
            )


@torch.no_grad()
def _proof_parts(parts: ModelParts, ops: Any) -> Parts:
    """What the proof at start-up asks about: every shape that this model uses."""
    model, config, family = parts.model, parts.model.config, parts.family
    linears: list[tuple[Any, torch.Tensor | None]] = []
    grouped: list[tuple[torch.Tensor, int]] = []
    rows: dict[str, RowOp] = {}
    for module in model.modules():
        if isinstance(module, ExactLinear):
            linears.append((module.exact_pack.of(module.weight), module.bias))
        elif isinstance(module, ExactRouter):
            linears.append((module.exact_pack.of(module.weight), None))
            choose = partial(chosen, ops.experts, count=module.top_k, normalise=module.norm_topk_prob)
            rows["router"] = RowOp(partial(_routing, choose), module.weight.shape[0])
        elif isinstance(module, (ExactExperts, ExactGroupedExperts)):
            if isinstance(module, ExactGroupedExperts):
                per_token = config.num_experts_per_tok
                grouped += [(module.gate_up_proj.detach(), per_token), (module.down_proj.detach(), per_token)]
            else:
                linears += module.packed()
            rows["activation of experts"] = RowOp(module.act_fn.forward, module.down_proj.shape[-1])
        elif type(module).__name__.endswith(family.norm_class):
            rows[f"norm of {len(module.weight)}"] = RowOp(module.forward, len(module.weight))
        elif family.mlp is not None and type(module).__name__ == f"{family.prefix}MLP":
            activation = module.get_submodule(str(family.mlp.activation))
            width = module.get_submodule(family.mlp.projections["down"]).in_features
            rows["activation"] = RowOp(activation.forward, width)
    if (cap := family.logit_cap(config)) is not None:
        rows["soft cap"] = RowOp(partial(soft_cap, cap=cap), config.vocab_size, torch.float32)
    if "activation" in ops.plain:
        rows = {name: row for name, row in rows.items() if not name.startswith("activation")}
    size = family.head_dim(config)
    return Parts(
        linears,
        size,
        {
            **rows,
            "cosine and sine": RowOp(_cosine_and_sine, size),
            "log-softmax": RowOp(log_softmax, config.vocab_size, torch.float32),
            "softmax": RowOp(partial(torch.softmax, dim=-1), config.vocab_size, torch.float32),
        },
        config.num_attention_heads // config.num_key_value_heads,
        tuple(dict.fromkeys(family.windows(config))),
        grouped,
    )


def _routing(choose: Any, logits_TE: torch.Tensor) -> torch.Tensor:
    """Weights, and behind them the numbers of the experts that have them."""
    weights_TK, experts_TK = choose(logits_TE)
    return torch.cat((weights_TK, experts_TK.to(weights_TK.dtype)), dim=-1)


def _cosine_and_sine(x: torch.Tensor) -> torch.Tensor:
    """What rotary embeddings are made of; the rest of them is products and sums of two numbers."""
    return torch.cat((x.float().cos(), x.float().sin()), dim=-1)


def parameters_on(model: Any) -> torch.device:
    """Where the model is."""
    device: torch.device = next(model.parameters()).device
    return device
