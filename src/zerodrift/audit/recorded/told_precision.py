"""In which precision were the numbers computed, where nobody says? Those that fit the checkpoint say so themselves.

Rounding to bf16 moves a logprob by about 1e-2, and fp32 by 1e-6: a rollout whose numbers are within 1e-4 of the
checkpoint's was not computed in bf16. One in ten rollouts is enough, because a fault moves the others; and they need
not fit as they stand, but under weights from before, under other parameters, or written in another way. Numbers that all
lie on the grid of bf16 were rounded to it.

Nothing else tells. A difference as large as bf16 rounds is as well that of weights half a percent away; nor do such
numbers follow what the checkpoint gives in bf16 (256 tokens of SmolLM2: rank correlation 0.31 to 0.39 in bf16, and 0.07
to 0.20 with other weights, of which 0.13 is chance). So each side is asked for itself, and may stay unknown.
"""

from typing import NamedTuple

import numpy as np

from zerodrift.config.precision import PROFILES, Precision
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import VETO_NATS, Gates
from zerodrift.stats.arrays import Floats

AS_FP32 = 1e-4
"""Nats, mean |Δ| of a rollout: twenty times the worst of 96 of SmolLM2 in fp32 (7e-7 to 5e-6)."""
SMALLEST = 1e-8
"""Nats: below the last bit that fp32 has of a logprob. "0 nats" reads as if nothing had been measured."""
LEAST_NATS = 0.1
"""Mean |log p|. Where all tokens are certain their logprobs are zero in any precision."""
SHARE = 0.1
LEAST = 2
LEAST_ON_GRID = 16
"""Numbers that are not zero. An fp32 number lies on the grid of bf16 once in 65,536."""
LOW_BITS = 0xFFFF
"""Of an fp32 number, which bf16 does not have."""
DECIMALS = (3, 4, 5, 6)
"""Numbers with four decimals are 2.5e-5 off on average, above the gate of fp32; with two they are as coarse as bf16."""
ASSUMED = Precision.BF16
FAR_BELOW = 10.0
"""Times nearer than bf16 rounds: healthy numbers in bf16 sit at 0.9 to 1.3 of its floor."""


class ToldPrecision(NamedTuple):
    """The precision that gates are taken from, and who says so."""

    precision: Precision
    message: str
    known: bool = True
    """False where nobody says so: what passes by these gates alone has not passed."""

    @property
    def in_fp32(self) -> bool:
        """Known to be so: what is above these gates is no rounding."""
        return self.known and self.precision is Precision.FP32


UNKNOWN = ToldPrecision(ASSUMED, f"{ASSUMED}, and nothing says which: say it with --precision", known=False)


class Scale(NamedTuple):
    """By what one side is judged."""

    told: ToldPrecision
    floor: Floor
    gates: Gates


class Shown(NamedTuple):
    """What one side's numbers show."""

    sizes: Floats
    """Mean |Δ| of every rollout under its best account."""
    nats: Floats
    """Mean |log p| of every rollout."""
    numbers: Floats
    """All of them, end to end."""


def precision_of(said: Precision | None, shown: Shown) -> ToldPrecision:
    """`said`, or what the numbers show."""
    if said is not None:
        return ToldPrecision(said, f"{said}, as was said")
    if on_bf16_grid(shown.numbers):
        return ToldPrecision(
            Precision.BF16, f"{Precision.BF16}, told from the numbers, which all lie on its grid"
        )
    telling = shown.nats >= LEAST_NATS
    fits = telling & (shown.sizes <= AS_FP32 + decimal_step(shown.numbers) / 2)
    if fits.sum() < max(LEAST, SHARE * telling.sum()):
        return UNKNOWN
    return in_fp32(
        f"{int(fits.sum())} of {len(fits)} rollouts can be explained", float(shown.sizes[fits].mean())
    )


def in_fp32(what: str, size: float) -> ToldPrecision:
    """Because of `what` was explained to `size`."""
    left = f"{size:.1g}" if size >= SMALLEST else f"less than {SMALLEST:.0g}"
    return ToldPrecision(Precision.FP32, f"{Precision.FP32}, told from the numbers: {what} to {left} nats")


def on_bf16_grid(numbers: Floats) -> bool:
    """Every number is one that bf16 has."""
    some = numbers[np.isfinite(numbers) & (numbers != 0)]
    narrow = some.astype(np.float32)
    if len(some) < LEAST_ON_GRID or (narrow != some).any():
        return False
    return not (narrow.view(np.uint32) & LOW_BITS).any()


def decimal_step(numbers: Floats) -> float:
    """The last decimal that the numbers were written with, where that is coarser than fp32; 0 where it is not."""
    some = numbers[np.isfinite(numbers) & (numbers != 0)]
    if len(some) < LEAST_ON_GRID:
        return 0.0
    return next((10.0**-places for places in DECIMALS if (np.round(some, places) == some).all()), 0.0)


def widened(gates: Gates, step: float) -> Gates:
    """By what cutting numbers off at `step` adds: an error of half of it at most, evenly spread."""
    return gates._replace(mean=gates.mean + step / 4, p90=gates.p90 + 0.45 * step, k3=gates.k3 + step**2 / 24)


def strictest() -> Gates:
    """Those of fp32 above no floor: what passes them passes in any precision."""
    gate = PROFILES[Precision.FP32].gate
    return Gates(gate.mean_abs, gate.p90_abs, gate.k3, VETO_NATS)


def nearer_than_rounding(precision: Precision, mean: float | None, floor: float) -> str:
    """What to say where these gates are far too wide for the numbers; empty where they are not."""
    if precision is Precision.FP32 or mean is None or mean * FAR_BELOW > floor:
        return ""
    return f"; mean |Δ| {mean:.2g} is far less than {precision} rounds ({floor:.2g}): --precision fp32 would see more"
