"""Faults of position: keys are turned by another angle, or seen from further or less far than they should be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zerodrift.backends.base import Backend
from zerodrift.faults.damage import Damage, Damaged
from zerodrift.faults.fault import Fault, Need
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.rope import rope_bases, with_rope_bases


class _Rotary(nn.Module):
    """Rotary tables for other positions than those of the tokens."""

    def __init__(self, rotary: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rotary = rotary
        self._change = change

    def forward(self, hidden_BLH: torch.Tensor, position_ids: torch.Tensor, *which: Any) -> Any:
        """Cosines and sines of the changed positions; `which` tables, where a model has several."""
        return self.rotary(hidden_BLH, self._change(position_ids), *which)


def _positions(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(model: Any) -> None:
        parts = ModelParts(model)
        parts.replace_rotary(_Rotary(parts.rotary, change))

    return damage


def _late_by_one(boundary: int) -> Damage:
    """A shift of every position would change nothing, since only distances count; this one changes distances."""
    return _positions(lambda positions: positions + (positions >= boundary))


def _theta(change: Callable[[float], float]) -> Damage:
    """Tables built anew by the model's own class, so that every kind of rope scaling stays as it was."""

    def damage(model: Any) -> None:
        parts = ModelParts(model)
        rotary, bases = parts.rotary, rope_bases(model.config)
        model.config.rope_parameters = with_rope_bases(
            model.config, {kind: change(base) for kind, base in bases.items()}
        )
        module, name = next(parts.frequencies())
        parts.replace_rotary(type(rotary)(config=model.config).to(getattr(module, name)))

    return damage


def _window(change: Callable[[Any], int]) -> Damage:
    """The width is read from the config whenever a mask is made."""

    def damage(model: Any) -> None:
        model.config.sliding_window = change(model.config)

    return damage


def _plant(damage: Damage) -> Callable[[Backend], Backend]:
    return lambda engine: Damaged(engine, damage)


POSITION_FAULTS = (
    Fault(
        "path/rope",
        "theta-doubled",
        "Computes rotary tables with twice the base.",
        _plant(_theta(lambda theta: 2 * theta)),
        (Need.INSIDE,),
    ),
    Fault(
        "path/rope",
        "theta-of-another-family",
        "Computes rotary tables with base 500,000 where it is 10,000, and with 10,000 where it is another.",
        _plant(_theta(lambda theta: 500_000.0 if theta == 10_000 else 10_000.0)),
        (Need.INSIDE,),
    ),
    Fault(
        "path/rope",
        "positions-stretched",
        "Multiplies positions by 1.05, as a scaling factor does that nobody asked for.",
        _plant(_positions(lambda positions: positions * 1.05)),
        (Need.INSIDE,),
    ),
    Fault(
        "path/window",
        "ignored",
        "Attends to the whole context in place of the sliding window.",
        _plant(_window(lambda config: int(config.max_position_embeddings))),
        (Need.REFERENCE, Need.SLIDING_WINDOW),
    ),
    Fault(
        "path/window",
        "halved",
        "Attends to half of the sliding window.",
        _plant(_window(lambda config: int(config.sliding_window) // 2)),
        (Need.REFERENCE, Need.SLIDING_WINDOW),
    ),
    Fault(
        "path/context-boundary",
        "page-16",
        "Counts one position too many from position 16 on.",
        _plant(_late_by_one(16)),
        (Need.INSIDE,),
    ),
    Fault(
        "path/context-boundary",
        "page-64",
        "Counts one position too many from position 64 on.",
        _plant(_late_by_one(64)),
        (Need.INSIDE,),
    ),
)
