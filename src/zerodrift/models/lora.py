"""A low-rank adapter beside a model's own weights, as a trainer runs it: x·Wᵀ + s·(x·Aᵀ)·Bᵀ, never merged.

An engine serves the sum W + s·B·A. Both are one function and round differently; in bf16 the sum can lose what a small
adapter learnt. Read from the files that `peft` writes, without it. What this does not compute is refused by name.
"""

import math
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import nn

from zerodrift.core.errors import InvalidValue, ModelError, UnsupportedModel
from zerodrift.models.directory import check_contained, read_json, shapes_in

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings that change the function, and the values under which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "lora_bias": (False,),
    "trainable_token_indices": (None,),
}


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


class AdaptedLinear(nn.Module):
    """A linear layer and the adapter beside it."""

    def __init__(self, base: nn.Linear, down_RI: torch.Tensor, up_OR: torch.Tensor, scale: float) -> None:
        """`down_RI` goes from the input to the rank, `up_OR` from there to the output."""
        super().__init__()
        self.base = base
        # In fp32 whatever the base is: that is what peft trains.
        self.down_RI, self.up_OR = nn.Parameter(down_RI.float()), nn.Parameter(up_OR.float())
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The base's own product, then the adapter's on top, in the base's dtype."""
        result: torch.Tensor = self.base(x)
        low = nn.functional.linear(x.to(self.down_RI.dtype), self.down_RI)
        return (result + self.scale * nn.functional.linear(low, self.up_OR)).to(result.dtype)


def attach(model: Any, directory: Path) -> Any:
    """`model` with the adapter of `directory` beside its linear layers; changed in place and returned."""
    if not directory.is_dir():
        raise InvalidValue(f"lora={directory} is no directory; it is the one in which {CONFIG} lies")
    check_contained(directory)
    settings = _settings(directory / CONFIG)
    for name, (down, up) in _pairs(directory / WEIGHTS).items():
        layer = _layer(model, name, directory)
        _check_shapes(name, layer, settings, down, up)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, AdaptedLinear(layer, down, up, settings.scale))
    return model


def _settings(path: Path) -> _Settings:
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {CONFIG}, so it holds no adapter")
    raw = read_json(path)
    for key, allowed in _PLAIN.items():
        if key in raw and raw[key] not in allowed:
            raise UnsupportedModel(f"{path}: {key}={raw[key]!r} is not supported; only plain LoRA is")
    try:
        settings = msgspec.convert(raw, _Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from error
    if settings.peft_type != "LORA" or settings.r < 1 or not math.isfinite(settings.lora_alpha):
        raise UnsupportedModel(
            f"{path}: peft_type={settings.peft_type!r}, r={settings.r}, lora_alpha={settings.lora_alpha} is no LoRA"
        )
    return settings


def _pairs(path: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Down and up projection by the name of the layer they belong to."""
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}; save the adapter as safetensors")
    shapes_in(path)
    tensors = load_file(path)
    pairs = {}
    for name in sorted(tensors):
        layer, _, side = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not name.startswith(_PREFIX) or side not in ("A.weight", "B.weight"):
            raise UnsupportedModel(f"{path}: {name} is neither lora_A.weight nor lora_B.weight of a layer")
        if not bool(tensors[name].double().sum().isfinite()):
            raise ModelError(f"{path}: {name} holds NaN or an infinity")
        stem = f"{_PREFIX}{layer}.lora_"
        if {f"{stem}A.weight", f"{stem}B.weight"} - tensors.keys():
            raise ModelError(f"{path}: of lora_A and lora_B of {layer} only one is there")
        pairs[layer] = (tensors[f"{stem}A.weight"], tensors[f"{stem}B.weight"])
    if not pairs:
        raise ModelError(f"{path} holds no tensors")
    return pairs


def _layer(model: Any, name: str, directory: Path) -> nn.Linear:
    try:
        layer = model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(f"{directory} adapts {name}, which the model does not have") from error
    if not isinstance(layer, nn.Linear):
        raise UnsupportedModel(f"{directory} adapts {name}, a {type(layer).__name__}; only linear layers are")
    return layer


def _check_shapes(
    name: str, layer: nn.Linear, settings: _Settings, down_RI: torch.Tensor, up_OR: torch.Tensor
) -> None:
    wanted = ((settings.r, layer.in_features), (layer.out_features, settings.r))
    found = (tuple(down_RI.shape), tuple(up_OR.shape))
    if found != wanted:
        raise ModelError(
            f"adapter of {name} has shapes {found}; rank {settings.r} on this layer needs {wanted}"
        )
