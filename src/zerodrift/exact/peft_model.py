"""A model of peft, exact with LoRA adapters beside its linears, never merged.

peft's own forward stays: base(x) + B(A(x)) · scale, in that order. Its three products become exact ones; the product with
the scale and the sum round every number by itself, so that no row knows of another. What else peft can put on a layer is
refused by the layer's name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from zerodrift.core.errors import UnsupportedModel
from zerodrift.exact.modules import ExactLinear, Pack
from zerodrift.exact.ops.interface import Ops
from zerodrift.models.family.check import require_no_adapter
from zerodrift.models.lora import LoraPair, LoraPairs, require_adaptable

_LINEAR = ("peft.tuners.lora.layer", "Linear")


def of_peft(module: Any) -> bool:
    """Whether peft made its class."""
    return type(module).__module__.startswith("peft.")


def unwrapped(model: Any) -> Any:
    """The transformers model inside of a `PeftModel`, adapters in their places; any other model as it is."""
    if not of_peft(model):
        return model
    kinds = {
        str(getattr(config.peft_type, "value", config.peft_type)) for config in model.peft_config.values()
    }
    if kinds != {"LORA"} or not hasattr(model, "get_base_model"):
        # Prompts that are learnt are outside of the model that is wrapped, and would be left out in silence.
        raise UnsupportedModel(
            f"the model is a {type(model).__name__} of PEFT with {', '.join(sorted(kinds))}; exact mode runs LoRA alone"
        )
    return model.get_base_model()


def lora_layers(model: Any) -> dict[str, Any]:
    """Linears of `model` with adapters, each as exact mode can run it, by their places."""
    found = {}
    for path, module in model.named_modules():
        if of_peft(module):
            check_layer(path, module)
            found[path] = module
    if found:
        require_adaptable(model, found, "the model of PEFT")
        if model.device.type != "cpu":
            raise UnsupportedModel(
                f"{next(iter(found))} has an adapter, which exact mode runs on the CPU alone yet, and the model is on "
                f"{model.device.type}"
            )
    return found


@contextmanager
def set_aside(model: Any, layers: Mapping[str, Any]) -> Iterator[None]:
    """The base alone, as if there were no adapters: its own linears in the places of `layers`."""
    for path, layer in layers.items():
        model.set_submodule(path, layer.base_layer)
    try:
        yield
    finally:
        for path, layer in layers.items():
            model.set_submodule(path, layer)


def exchange_adapters(layers: Mapping[str, Any], ops: Ops) -> None:
    """A and B of every adapter are exact from now on; those that are stay so."""
    for layer in layers.values():
        linears: list[Any] = [*layer.lora_A.values(), *layer.lora_B.values()]
        for linear in linears:
            if not isinstance(linear, ExactLinear):
                linear.__class__ = ExactLinear
                linear.exact_pack = Pack(ops)


def require_prepared(path: str, layer: Any) -> None:
    """A layer that nobody added to or merged since."""
    check_layer(path, layer)
    if any(type(linear) is not ExactLinear for linear in (*layer.lora_A.values(), *layer.lora_B.values())):
        raise UnsupportedModel(
            f"{path} got an adapter since the model was prepared; call zerodrift.exact.prepare(model) once more"
        )


def check_layer(path: str, layer: Any) -> None:
    """Plain LoRA on a linear, or `UnsupportedModel` says what it is."""
    if (type(layer).__module__, type(layer).__name__) != _LINEAR or not isinstance(
        layer.base_layer, nn.Linear
    ):
        require_no_adapter(path, layer)
    variants = [type(each).__name__ for each in getattr(layer, "lora_variant", {}).values()]
    dropouts = [each.p for each in layer.lora_dropout.values() if isinstance(each, nn.Dropout) and each.p]
    instead = {
        f"a variant of LoRA ({', '.join(variants)}); train plain LoRA": bool(variants),
        "an adapter that is merged into the base; call unmerge_adapter()": layer.merged,
        f"several adapters active at once, {layer.active_adapters}; set one": len(layer.active_adapters) > 1,
        "an adapter with a bias of its own; set lora_bias=False": any(
            each.bias is not None for each in layer.lora_B.values()
        ),
        "a weight that is stored transposed (fan_in_fan_out)": layer.fan_in_fan_out,
        f"a lora_dropout of {dropouts[:1]}; a trainer that drops inputs agrees with no engine: set it to 0": bool(
            dropouts
        ),
        "an adapter of another dtype than the base's; exact mode mixes none: pass autocast_adapter_dtype=False": any(
            each.weight.dtype is not layer.base_layer.weight.dtype
            for each in (*layer.lora_A.values(), *layer.lora_B.values())
        ),
    }
    if found := [what for what, there in instead.items() if there]:
        raise UnsupportedModel(f"{path} has {found[0]}")


def pairs_in(model: Any, adapter: str | None = None) -> LoraPairs:
    """The tensors of one adapter of a PEFT model, by default the active one; views, not copies."""
    layers = lora_layers(unwrapped(model))
    if adapter is None:
        active = {name for layer in layers.values() for name in layer.active_adapters}
        if len(active) != 1:
            raise UnsupportedModel(
                f"the model has {sorted(active) or 'no adapters'} active; name the adapter"
            )
        (adapter,) = active
    pairs = {
        path: LoraPair(
            layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, float(layer.scaling[adapter])
        )
        for path, layer in layers.items()
        if adapter in layer.lora_A
    }
    if not pairs:
        raise UnsupportedModel(f"the model has no adapter {adapter!r}")
    return pairs
