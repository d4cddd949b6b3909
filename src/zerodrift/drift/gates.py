"""How much drift is too much: relative to the measured floor and to the precision profile, never one absolute number.

docs/attribution.md gives the same numbers to people; `tests/unit/drift/test_gates.py` holds the two together.
"""

import math
from collections.abc import Set
from typing import NamedTuple

from zerodrift.config.precision import Magnitude
from zerodrift.drift.floor import Floor

LEAST_TOKENS = 200
"""Fewer tokens than this decide nothing: a top-p fault needs about 400."""
FLOOR_MULTIPLES = {"float32": 5.0}
"""An engine has other kernels than the reference's variants: vLLM on CPU sits at 2 to 4 floors in fp32."""
FLOOR_MULTIPLE = 2.0
"""In any other precision, where rounding to it dwarfs the order of sums: healthy engines sit at 1.0 to 1.3 floors."""
VETO_NATS = 2.0
"""No trained dense model in bf16 was ever seen above 0.5 on a healthy token. Where the floor is higher than theirs, as
on built-in models, whose logits are large, so is the veto."""
VETO_PER_P90 = 20.0


K3_POWER = 2
"""k3 is about Δ²/2: what is allowed so many floors of |Δ| is allowed the square of that of the floor's k3. Healthy runs
in bf16 sat at 0.6 to 1.8 floors of k3 (temperatures 0.3 to 1.5, tails included), and the gate is at four."""


class Gates(NamedTuple):
    """The limits in force: the profile's, or a multiple of the measured floor where that is higher."""

    mean: float
    p90: float
    k3: float
    veto: float

    @property
    def outlier(self) -> float:
        """|Δ| of a token that is wrong by itself: the worst of 2,042 healthy tokens in fp32 was at a third of it."""
        return 2 * self.p90

    @property
    def unlike_rounding(self) -> float:
        """|Δ| that no rounding makes, tails included: the worst of 80,000 healthy tokens in bf16 was at 6.5 gates of p90."""
        return 10 * self.p90


def gates_for(gate: Magnitude, floor: Floor, own: Set[str] = frozenset(), most_k3: float = math.inf) -> Gates:
    """The gates of a profile above this floor; those of `own` are the user's, and are taken as they are.

    So is `most_k3`: whatever the floor, k3 may not be more.
    """
    multiple = FLOOR_MULTIPLES.get(floor.precision, FLOOR_MULTIPLE)
    mean = gate.mean_abs if "mean_abs" in own else max(gate.mean_abs, multiple * floor.mean)
    p90 = gate.p90_abs if "p90_abs" in own else max(gate.p90_abs, multiple * floor.p90)
    k3 = gate.k3 if "k3" in own else max(gate.k3, multiple**K3_POWER * floor.k3)
    return Gates(mean, p90, min(k3, most_k3), max(VETO_NATS, VETO_PER_P90 * multiple * floor.p90))
