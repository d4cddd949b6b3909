"""A low-rank adapter beside a model's own weights, as a trainer runs it: x·Wᵀ + s·(x·Aᵀ)·Bᵀ, never merged.

An engine serves the sum W + s·B·A. Both are one function and round differently; in bf16 the sum can lose what a small
adapter learnt. Read from the files that `peft` writes, without it. What this does not compute is refused by name.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load_file
from torch import nn

from zerodrift.core.errors import InvalidValue, ModelError, UnsupportedModel
from zerodrift.models.directory import check_contained, read_json, shapes_in
from zerodrift.models.family.registry import family_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings that leave the function alone: where adapters are is seen in the tensors, and dropout is the trainer's.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
_PLAIN: dict[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
"""Settings that change the function, or the base (PiSSA, OLoRA, LoftQ), unless they have one of these values."""


class _Settings(msgspec.Struct, frozen=True):
    """The part of adapter_config.json that is computed with."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class LoraPair(NamedTuple):
    """What stands beside one linear layer."""

    down_RI: torch.Tensor
    """lora_A: from the input to the rank."""
    up_OR: torch.Tensor
    """lora_B: from there to the output."""
    scale: float


LoraPairs = Mapping[str, LoraPair]
"""An adapter, by the names of the layers that it is beside."""


class AdaptedLinear(nn.Module):
    """A linear layer and the adapter beside it."""

    def __init__(self, base: nn.Linear, pair: LoraPair) -> None:
        super().__init__()
        self.base = base
        # In fp32 whatever the base is: that is what peft trains.
        self.down_RI, self.up_OR = nn.Parameter(pair.down_RI.float()), nn.Parameter(pair.up_OR.float())
        self.scale = pair.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base's own product, then the adapter's on top, in the base's dtype."""
        result: torch.Tensor = self.base(x)
        low = nn.functional.linear(x.to(self.down_RI.dtype), self.down_RI)
        return (result + self.scale * nn.functional.linear(low, self.up_OR)).to(result.dtype)


def attach(model: Any, directory: Path) -> Any:
    """`model` with the adapter of `directory` beside its linear layers; changed in place and returned."""
    pairs = read_adapter(directory)
    layers = layers_under(model, pairs, str(directory))
    for name, pair in pairs.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, AdaptedLinear(layers[name], pair))
    return model


def read_adapter(directory: Path) -> LoraPairs:
    """What `save_pretrained` of peft wrote to `directory`."""
    if not directory.is_dir():
        raise InvalidValue(f"lora={directory} is no directory; it is the one in which {CONFIG} lies")
    check_contained(directory)
    path = directory / CONFIG
    if not path.is_file():
        raise ModelError(f"{directory} has no {CONFIG}, so it holds no adapter")
    config, weights = read_json(path), directory / WEIGHTS
    _settings(config, str(path))
    if not weights.is_file():
        raise ModelError(f"{directory} has no {WEIGHTS}; save the adapter as safetensors")
    shapes_in(weights)
    return pairs_of(load_file(weights), config, str(weights))


def pairs_of(state: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str) -> LoraPairs:
    """Of the tensors and the settings that peft has for an adapter; `where` they are from, for messages."""
    settings = _settings(config, where)
    pairs = {}
    for name in sorted(state):
        layer, _, side = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not name.startswith(_PREFIX) or side not in ("A.weight", "B.weight"):
            raise UnsupportedModel(f"{where}: {name} is neither lora_A.weight nor lora_B.weight of a layer")
        if not bool(state[name].double().sum().isfinite()):
            raise ModelError(f"{where}: {name} holds NaN or an infinity")
        stem = f"{_PREFIX}{layer}.lora_"
        if {f"{stem}A.weight", f"{stem}B.weight"} - state.keys():
            raise ModelError(f"{where}: of lora_A and lora_B of {layer} only one is there")
        pairs[layer] = LoraPair(state[f"{stem}A.weight"], state[f"{stem}B.weight"], settings.scale)
        if pairs[layer].down_RI.shape[0] != settings.r:
            raise ModelError(
                f"{where}: the adapter of {layer} has rank {pairs[layer].down_RI.shape[0]}, and r={settings.r} is written"
            )
    if not pairs:
        raise ModelError(f"{where} holds no tensors")
    return pairs


def adaptable(model: Any) -> tuple[str, ...]:
    """Linear layers inside of the decoder's layers: what an adapter may be beside in exact mode."""
    family = family_of(model)
    inside = f"{family.below_decoder(family.layers)}."
    classes = family.classes(model.config)
    return tuple(place for place, kind in classes.items() if kind == "Linear" and place.startswith(inside))


def require_adaptable(model: Any, places: Iterable[str], where: str) -> None:
    """Every one of `places` is; or the first that is not is named."""
    known = frozenset(adaptable(model))
    if wrong := [place for place in places if place not in known]:
        raise UnsupportedModel(
            f"{where} adapts {wrong[0]}, which exact mode runs without adapters; target linear layers of the decoder "
            f"({', '.join(sorted({place.rpartition('.')[2] for place in known}))})"
        )


def layers_under(model: Any, pairs: LoraPairs, where: str) -> dict[str, nn.Linear]:
    """The linear layers of `model` that the adapter is made for: each there, and of its shape."""
    return {name: _layer(model, name, pair, where) for name, pair in pairs.items()}


def _settings(raw: Mapping[str, Any], where: str) -> _Settings:
    for key, value in raw.items():
        allowed = _PLAIN.get(key)
        if key in _HARMLESS or (not value if allowed is None else value in allowed):
            continue
        raise UnsupportedModel(f"{where}: {key}={value!r} is not supported; only plain LoRA is")
    try:
        settings = msgspec.convert(dict(raw), _Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from error
    if settings.peft_type != "LORA" or settings.r < 1 or not math.isfinite(settings.lora_alpha):
        raise UnsupportedModel(
            f"{where}: peft_type={settings.peft_type!r}, r={settings.r}, lora_alpha={settings.lora_alpha} is no LoRA"
        )
    return settings


def _layer(model: Any, name: str, pair: LoraPair, where: str) -> nn.Linear:
    try:
        layer = model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(f"{where} adapts {name}, which the model does not have") from error
    if not isinstance(layer, nn.Linear):
        raise UnsupportedModel(f"{where} adapts {name}, a {type(layer).__name__}; only linear layers are")
    rank = len(pair.down_RI)
    wanted = ((rank, layer.in_features), (layer.out_features, rank))
    found = (tuple(pair.down_RI.shape), tuple(pair.up_OR.shape))
    if found != wanted:
        raise ModelError(f"adapter of {name} has shapes {found}; rank {rank} on this layer needs {wanted}")
    return layer
