"""The closed vocabulary of causes, each with what it means and the fix as a user would type it.

The first word of a cause's name is the layer it lives in, and the file of `core/causes/` that its entry stands in. A
verdict may name these and nothing else; what fits none of them is `unexplained`, with the shape of the difference.
"""

from collections.abc import Mapping

from zerodrift.core.causes.entry import ANY_ENGINE, Cause, Expected, Layer, cause
from zerodrift.core.causes.objective import OBJECTIVE
from zerodrift.core.causes.path import PATH
from zerodrift.core.causes.semantic import SEMANTIC
from zerodrift.core.causes.trainer import TRAINER
from zerodrift.core.causes.weights import WEIGHTS
from zerodrift.core.frozen import FrozenDict

__all__ = ["ANY_ENGINE", "CAUSES", "UNEXPLAINED", "Cause", "Expected", "Layer"]

UNEXPLAINED = "unexplained"

_UNEXPLAINED = cause(
    UNEXPLAINED,
    "The difference is real and fits none of the known causes; its shape is in the evidence.",
    "keep the run directory, and bisect with the probes that failed",
)

CAUSES: Mapping[str, Cause] = FrozenDict(
    (each.name, each) for each in (*SEMANTIC, *PATH, *WEIGHTS, *TRAINER, *OBJECTIVE, _UNEXPLAINED)
)
