"""Several LoRA adapters beside one exact model: rows of a step are grouped by adapter, and each has the trainer's bits.

A row gets base(x) + B(A(x)) · scale, as peft computes it, from the products of its own adapter alone; exact products
give a row the same bits whatever rows stand beside it, so neither the other adapters of a step nor their number matter.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from zerodrift.core.errors import NonFinite, UnsupportedModel
from zerodrift.core.version import AdapterVersion
from zerodrift.exact.modules import ExactLinear
from zerodrift.exact.ops.interface import Ops
from zerodrift.exact.preparation import ops_of
from zerodrift.models.lora import LoraPair, LoraPairs, adaptable, layers_under, require_adaptable
from zerodrift.weights.adapter import adapter_digest

_STATE = "exact_adapters"


class _Packed(NamedTuple):
    """A pair in the layout of the ops."""

    ops: Ops
    down: Any
    up: Any
    scale: float

    def beside(self, x_TK: torch.Tensor) -> torch.Tensor:
        """B(A(x)) · scale."""
        low_TR = self.ops.linear(x_TK, self.down, None)
        return self.ops.linear(low_TR, self.up, None) * self.scale


class LoraAdapter:
    """One adapter, copied, verified and packed for one model's ops."""

    def __init__(self, model: Any, name: str, pairs: LoraPairs, base: str) -> None:
        """`model` is prepared and has weights of digest `base`. Nothing of it is changed."""
        where = f"adapter {name!r}"
        if model.device.type != "cpu":
            raise UnsupportedModel(
                f"{where} was to be loaded on {model.device.type}; exact mode runs adapters on the CPU alone yet: merge it"
            )
        require_adaptable(model, pairs, where)
        layers_under(model, pairs, where)
        own = {place: _copied(place, pair, model.dtype, where) for place, pair in pairs.items()}
        self.base = base
        self.version = AdapterVersion(name, adapter_digest(base, own))
        ops = ops_of(model)
        self.packed = {
            place: _Packed(ops, ops.pack(pair.down_RI), ops.pack(pair.up_OR), pair.scale)
            for place, pair in own.items()
        }


class RowGroup(NamedTuple):
    """Rows of a forward that run with one adapter."""

    adapter: LoraAdapter
    rows: torch.Tensor | None
    """None: all of them."""


class _Active:
    """What the linears of one model run with right now. A copy of the model has its own, and begins without."""

    def __init__(self) -> None:
        self.groups: tuple[RowGroup, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Active":
        return _Active()


class ExactLoraLinear(ExactLinear):
    """An exact linear beside which adapters may stand. Never constructed: `make_room` exchanges the class."""

    lora_place: str
    lora_active: _Active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b, and what the adapter of each row adds."""
        out = super().forward(x)
        for adapter, rows in self.lora_active.groups:
            packed = adapter.packed.get(self.lora_place)
            if packed is None:
                continue
            x_TK, out_TN = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
            if rows is None:
                out = (out_TN + packed.beside(x_TK)).view(out.shape)
            else:
                out_TN.index_copy_(0, rows, out_TN[rows] + packed.beside(x_TK[rows]))
        return out


def make_room(model: Any) -> Any:
    """`model`, an engine's own prepared one, whose linears take adapters from now on."""
    active = _Active()
    setattr(model, _STATE, active)
    for place in adaptable(model):
        linear = model.get_submodule(place)
        linear.__class__ = ExactLoraLinear
        linear.lora_place, linear.lora_active = place, active
    return model


@contextmanager
def applied(model: Any, groups: Sequence[RowGroup]) -> Iterator[None]:
    """Rows of the forwards inside of this run with their adapters. Without gradient."""
    if not groups:
        yield
        return
    active: _Active = getattr(model, _STATE)
    active.groups = tuple(groups)
    try:
        yield
    finally:
        active.groups = ()


def _copied(place: str, pair: LoraPair, dtype: torch.dtype, where: str) -> LoraPair:
    """A copy, since a trainer may write to its own at any time: what is verified is what runs."""
    for name, tensor in (("lora_A", pair.down_RI), ("lora_B", pair.up_OR)):
        if tensor.dtype is not dtype:
            raise UnsupportedModel(
                f"{where}: {name} of {place} is {tensor.dtype}, and the model is {dtype}; exact mode mixes none: train and "
                "save the adapter in the model's dtype"
            )
    copied = LoraPair(pair.down_RI.detach().clone(), pair.up_OR.detach().clone(), pair.scale)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in copied[:2]):
        raise NonFinite(f"{where}: the adapter of {place} holds NaN or an infinity; it is not loaded")
    return copied
