"""How far rounding alone moves a logprob, as a value. `audit/floor.py` measures it; whoever judges reads it."""

import msgspec
import numpy as np

from zerodrift.config.precision import Precision
from zerodrift.stats.arrays import Floats

ROUNDED_IN = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP8: "bfloat16"}
"""What the floor is measured in: fp8 rounds what is stored, and computes in bf16."""
REPORT_EPSILON = 2.0**-24
"""Engines report fp32 numbers; half a unit in the last place of a logprob near 1."""


class Floor(msgspec.Struct, frozen=True):
    """The rounding floor: a summary, and a curve from log p to σ."""

    precision: str
    num_variants: int
    num_tokens: int
    mean: float
    """Mean |deviation| of a variant from the reference."""
    p90: float
    edges: tuple[float, ...]
    """log p at the points of the curve, ascending."""
    sigmas: tuple[float, ...]
    k3: float = 0.0
    """Mean of exp(d) - 1 - d over the deviations d: about d²/2, and more where they have tails."""
    unshaped: "Floor | None" = None
    """The floor at temperature 1, of what is scored or asked so; None where this is it."""

    def sigma(self, logprobs: Floats) -> Floats:
        """Rounding scale of tokens with these logprobs; one that was excluded (−inf) has that of a rare token."""
        logprobs = np.maximum(logprobs, -100.0)
        curve = np.interp(logprobs, self.edges, self.sigmas)
        result: Floats = np.hypot(curve, REPORT_EPSILON * np.maximum(1.0, np.abs(logprobs)))
        return result

    def as_record(self) -> dict[str, float]:
        """What a verdict keeps of it."""
        return {"mean": self.mean, "p90": self.p90, "k3": self.k3, "variants": self.num_variants}
