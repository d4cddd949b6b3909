"""Rotary frequencies of some wavelengths multiplied: what context extensions do to long ones, and a table that was made wrongly.

Two numbers: from which frequency on, and by how much. Factors that are in use are looked at from some frequencies on; near
the best look the frequency is found by steps that halve, and then the factor by secants.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from zerodrift.audit.counterfactual.explanation import Explanation
from zerodrift.audit.counterfactual.position import FitCost, by_secants
from zerodrift.audit.counterfactual.variant import Variant
from zerodrift.models.copies import sharing
from zerodrift.models.family.parts import ModelParts
from zerodrift.models.family.registry import FAMILIES

FACTORS = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 2 / 3, 3 / 2, 2.0, 4.0, 8.0)
PIECES = 8
"""So many places to begin at are looked at."""
REACH = 0.4
"""How far one secant may go, in nats of the factor: half of the way between looks."""


class RotaryBand(NamedTuple):
    """Frequencies of a table from one of its ends to a place in it, all multiplied."""

    table: str
    size: int
    place: int
    slow: bool
    """Those of the longest wavelengths; else those of the shortest."""
    factor: float

    @property
    def variant(self) -> Variant:
        """The model with this table."""
        first, last = (self.place, self.size) if self.slow else (0, self.place)
        message = f"rotary frequencies {first} to {last - 1} of {self.size} multiplied by {self.factor:.9g}"
        if self.table != "inv_freq":
            message += f" in {self.table.removesuffix('_inv_freq')} layers"
        return Variant("path/rope", message, partial(_with_table, self))


def bands(model: Any) -> Iterator[RotaryBand]:
    """Where to look; of families that are described alone, since others may lay frequencies out otherwise."""
    if model.config.model_type not in FAMILIES:
        return
    for module, table in ModelParts(model).frequencies():
        size = getattr(module, table).shape[-1]
        for place in sorted({size * piece // PIECES for piece in range(1, PIECES)} - {0}):
            for slow in (True, False):
                yield from (RotaryBand(table, size, place, slow, factor) for factor in FACTORS)


def refined(band: RotaryBand, fit: FitCost, explained: Callable[[Variant], Explanation]) -> RotaryBand:
    """The best band near one that was looked at."""

    def cost(tried: RotaryBand) -> float:
        return fit.cost(explained(tried.variant))

    step = max(1, band.size // PIECES // 2)
    while step:
        around = [band._replace(place=band.place + each) for each in (-step, step)]
        best = min([band, *(each for each in around if 0 < each.place < each.size)], key=cost)
        step = step // 2 if best == band else step
        band = best
    value = by_secants(
        lambda factor: explained(band._replace(factor=factor).variant), fit, band.factor, REACH
    )
    return band._replace(factor=value)


def _with_table(band: RotaryBand, model: Any) -> Any:
    changed = ModelParts(sharing(model))
    for module, table in changed.frequencies():
        if table == band.table:
            speeds = getattr(module, table).clone()
            speeds[slice(band.place, None) if band.slow else slice(band.place)] *= band.factor
            setattr(module, table, speeds)
    return changed.model
