"""Are the numbers those of fp32, and only sampled with other parameters than were assumed?

A temperature of 0.9 or a top-p of 0.95 moves logprobs by no more than bf16 does. Under the right parameters, and in fp32,
they fit to the last digit, which nothing but those can do: that tells both.
"""

from collections.abc import Sequence

import numpy as np

from zerodrift.audit.counterfactual.explanation import Explanation
from zerodrift.audit.diagnose import Suspect, by_meaning
from zerodrift.audit.measure import Measurement
from zerodrift.audit.recorded.told_precision import ToldPrecision, in_fp32, strictest
from zerodrift.drift.floor import Floor

SIGMA = 1e-5
"""Nats: what fp32 rounds at most. Four of these, where an account counts as exact, are a thousandth of bf16's."""
IN_FP32 = Floor(
    precision="float32",
    num_variants=0,
    num_tokens=0,
    mean=SIGMA,
    p90=2.5 * SIGMA,
    edges=(-100.0, 0.0),
    sigmas=(SIGMA, SIGMA),
)
"""A guess: measuring it takes as long as a scoring pass, and is for nothing where the numbers are no fp32."""


def told_by_parameters(
    suspect: Suspect, measurements: Sequence[Measurement], seed: int
) -> ToldPrecision | None:
    """fp32, where another meaning of the numbers explains every one of them; None where none does."""
    attribution = by_meaning(suspect, measurements, IN_FP32, strictest(), np.random.default_rng(seed))
    if not attribution.explained_to_floor or attribution.explanation == Explanation():
        return None
    how = ", ".join(each.message for each in attribution.selected)
    return in_fp32(f"under “{how}” they fit", attribution.residual_sigmas * SIGMA)
