"""In which precision were the numbers computed, where nobody says? Those that fit the checkpoint say so themselves.

Rounding to bf16 moves a logprob by about 1e-2, and fp32 by 1e-6: a rollout whose numbers are within 1e-4 of the
checkpoint's was not computed in bf16. One in ten rollouts is enough, because a fault moves the others; and they need
not fit as they stand, but under weights from before, or written in another way.
"""

from collections.abc import Sequence
from typing import NamedTuple

from zerodrift.config.precision import Precision
from zerodrift.stats.arrays import Floats

AS_FP32 = 1e-4
"""Nats, mean |Δ| of a rollout: twenty times the worst of 96 of SmolLM2 in fp32 (7e-7 to 5e-6)."""
LEAST_NATS = 0.1
"""Mean |log p|. Where all tokens are certain their logprobs are zero in any precision."""
SHARE = 0.1
LEAST = 2
ASSUMED = Precision.BF16


class Told(NamedTuple):
    """The precision that gates are taken from, and who says so."""

    precision: Precision
    message: str


def precision_of(said: Precision | None, columns: Sequence[Floats], nats: Floats) -> Told:
    """`said`, or what each of the `columns` shows: mean |Δ| of every rollout under its best account; `nats`: mean |log p|."""
    if said is not None:
        return Told(said, f"{said}, as was said")
    telling = nats >= LEAST_NATS
    fitting = [telling & (sizes <= AS_FP32) for sizes in columns]
    if all(fits.sum() >= max(LEAST, SHARE * telling.sum()) for fits in fitting):
        count, size = int(fitting[0].sum()), float(columns[0][fitting[0]].mean())
        return Told(
            Precision.FP32,
            f"{Precision.FP32}, told from the numbers: {count} of {len(nats)} rollouts can be explained to {size:.1g} nats",
        )
    return Told(ASSUMED, f"{ASSUMED}, because too few of the numbers fit to tell; --precision names another")
