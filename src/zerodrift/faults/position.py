"""Faults of position: keys are turned by another angle, or seen from further or less far than they should be."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zerodrift.faults.damage import Damage, damaged
from zerodrift.faults.wrapper import Plant
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


POSITION_FAULTS: Mapping[str, Plant] = {
    "path/rope:theta-doubled": damaged(_theta(lambda theta: 2 * theta)),
    "path/rope:theta-of-another-family": damaged(
        _theta(lambda theta: 500_000.0 if theta == 10_000 else 10_000.0)
    ),
    "path/rope:positions-stretched": damaged(_positions(lambda positions: positions * 1.05)),
    "path/window:ignored": damaged(_window(lambda config: int(config.max_position_embeddings))),
    "path/window:halved": damaged(_window(lambda config: int(config.sliding_window) // 2)),
    "path/window:five-short": damaged(_window(lambda config: int(config.sliding_window) - 5)),
    "path/context-boundary:page-16": damaged(_late_by_one(16)),
    "path/context-boundary:page-64": damaged(_late_by_one(64)),
}
