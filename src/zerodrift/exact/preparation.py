"""Make a `transformers` causal LM exact in place, and undo it.

Three replacements: linears by prepacked ones, activations by safe ones, attention by blocks at absolute positions,
through the attention interface of transformers. Nothing global is patched. A model with a part that is not known
to be exact is refused by the name of that part.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from zerodrift.core.errors import Unproven, UnsupportedModel
from zerodrift.exact import interface
from zerodrift.exact.modules import ExactActivation, ExactLinear, ExactNorm, Pack
from zerodrift.exact.normalisation import log_softmax
from zerodrift.exact.ops.cpu.op_set import CpuOps
from zerodrift.exact.ops.interface import Parts
from zerodrift.exact.rotary import ROPE_TYPES, exchange_rotary, give_back_rotary

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
_OWN_PARTS = frozenset(
    f"{family}{part}"
    for family in FAMILIES
    for part in ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
)
_SHARED_PARTS = frozenset(
    {"Embedding", "Linear", "ModuleList", "ExactLinear", "ExactActivation", "ExactRotary"}
)
_STATE = "exact_state"


def prepare(model: Any, *, plain: frozenset[str] = frozenset()) -> Any:
    """`model` itself, exact from now on. `plain` leaves ops as torch has them: for negative controls and benches."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"a {type(model).__name__} cannot be prepared; give a transformers model (models.load)"
        )
    if getattr(model, _STATE, None) is not None:
        return model
    _check_parts(model)
    ops = _ops_for(model, plain)
    _check_numbers(model, ops)
    interface.register()
    setattr(model, _STATE, (ops, model.config._attn_implementation))  # noqa: SLF001  no public getter
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ExactLinear
            module.exact_pack = Pack(ops)  # type: ignore[assignment]
        elif type(module).__name__.endswith("Attention"):
            module.exact_ops = ops
        elif type(module).__name__.endswith("RMSNorm") and ops.rms_norm is not None:
            module.exact_ops = ops
            module.__class__ = type("ExactRMSNorm", (ExactNorm, type(module)), {})
        elif type(module).__name__.endswith("RotaryEmbedding"):
            exchange_rotary(module)
        if "activation" not in plain and (original := getattr(module, "act_fn", None)) is not None:
            module.act_fn = ExactActivation(original, ops.activation(model.config.hidden_act))
    model.set_attn_implementation(interface.NAME)
    try:
        ops.prove(_parts(model))
    except Unproven:
        restore(model)
        raise
    return model


def restore(model: Any) -> Any:
    """`model` as it was before `prepare`: vanilla bits again, whatever was trained in between kept."""
    state = getattr(model, _STATE, None)
    if state is None:
        return model
    for module in model.modules():
        if type(module) is ExactLinear:
            del module.exact_pack
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif hasattr(module, "exact_ops"):
            del module.exact_ops
            if isinstance(module, ExactNorm):
                module.__class__ = type(module).__bases__[1]
        elif type(module).__name__ == "ExactRotary":
            give_back_rotary(module)
        if isinstance(exact := getattr(module, "act_fn", None), ExactActivation):
            module.act_fn = exact.original[0]
    model.set_attn_implementation(state[1])
    delattr(model, _STATE)
    return model


def settle(model: Any) -> Any:
    """`model`, to which nobody writes any more without `refresh`: its forwards need not look whether somebody did."""
    for module in model.modules():
        if isinstance(module, ExactLinear):
            module.exact_pack.settled = True
    return model


def refresh(model: Any) -> None:
    """Forget packed weights. Needed only where a settled model was written to."""
    for module in model.modules():
        if isinstance(module, ExactLinear):
            module.exact_pack.drop()


def ops_of(model: Any) -> Any:
    """The ops of a prepared model."""
    state = getattr(model, _STATE, None)
    if state is None:
        raise UnsupportedModel("the model is not prepared; call zerodrift.exact.prepare(model) first")
    return state[0]


def require_gathered(model: Any) -> None:
    """Parts of a model that FSDP2 has sharded cannot be called one by one: nothing would gather their weights."""
    if hasattr(model.lm_head.weight, "placements"):
        raise UnsupportedModel(
            "the model is sharded by FSDP2, which gathers weights only where the whole model is called: take "
            f"log-probabilities from model(input_ids=…).logits, {_of_logits(model)}"
        )


def _of_logits(model: Any) -> str:
    if model.dtype is torch.float32:
        return "whose bits are the same"
    return f"and know that {model.dtype} rounds those, while an engine keeps them in fp32"


def _ops_for(model: Any, plain: frozenset[str]) -> Any:
    kinds = {parameter.device.type for parameter in model.parameters()}
    if kinds == {"cpu"}:
        return CpuOps(plain)
    if kinds == {"cuda"} and len({parameter.device for parameter in model.parameters()}) == 1:
        # Triton comes with torch for CUDA only, and is imported only where it can run.
        return import_module("zerodrift.exact.ops.triton.op_set").CudaOps(plain)
    raise UnsupportedModel(
        f"parameters lie on {sorted(kinds)}; exact mode runs a model that is wholly on the CPU or on one GPU"
    )


def _check_parts(model: Any) -> None:
    for path, module in model.named_modules():
        kind = type(module).__name__
        if kind not in _OWN_PARTS and kind not in _SHARED_PARTS and not path.endswith(".act_fn"):
            raise UnsupportedModel(
                f"{path or 'the model'} is a {kind}, which is not known to be exact; "
                f"exact mode runs the parts of {', '.join(FAMILIES)}"
            )
        activation = getattr(module, "act_fn", None)
        if activation is not None and type(activation) is not type(ACT2FN[model.config.hidden_act]):
            raise UnsupportedModel(
                f"{path}.act_fn is a {type(activation).__name__}, but hidden_act is {model.config.hidden_act!r}"
            )


def _check_numbers(model: Any, ops: Any) -> None:
    config = model.config
    if found := sorted({str(p.dtype) for p in model.parameters() if p.dtype not in ops.dtypes}):
        wanted = " or ".join(str(dtype) for dtype in ops.dtypes)
        raise UnsupportedModel(
            f"parameters are {found}; on this device exact mode computes in {wanted}: load them so"
        )
    if ops.activation(config.hidden_act) is None:
        raise UnsupportedModel(f"hidden_act is {config.hidden_act!r}, which has no exact form here")
    if config.attention_dropout:
        raise UnsupportedModel(
            f"attention_dropout is {config.attention_dropout}; a trainer that drops keys cannot agree with any engine: "
            "set it to 0"
        )
    rope = config.rope_parameters["rope_type"]
    if rope not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type is {rope!r}; exact mode has {', '.join(ROPE_TYPES)}")


@torch.no_grad()
def _parts(model: Any) -> Parts:
    config = model.config
    linears, norms = [], {}
    for module in model.modules():
        if isinstance(module, ExactLinear):
            linears.append((module.exact_pack.of(module.weight), module.bias))
        elif type(module).__name__.endswith("RMSNorm"):
            norms[f"norm of {len(module.weight)}"] = (module.forward, len(module.weight))
    layer = model.model.layers[0]
    return Parts(
        linears,
        layer.self_attn.head_dim,
        {
            **norms,
            "activation": (layer.mlp.act_fn.forward, config.intermediate_size),
            "cosine and sine": (_cosine_and_sine, layer.self_attn.head_dim),
            "log-softmax": (log_softmax, config.vocab_size),
            "softmax": (partial(torch.softmax, dim=-1), config.vocab_size),
        },
    )


def _cosine_and_sine(x: torch.Tensor) -> torch.Tensor:
    """What rotary embeddings are made of; the rest of them is products and sums of two numbers."""
    return torch.cat((x.float().cos(), x.float().sin()), dim=-1)


def parameters_on(model: Any) -> torch.device:
    """Where the model is."""
    device: torch.device = next(model.parameters()).device
    return device
