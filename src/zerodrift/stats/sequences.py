"""Which tokens belong together: sums over the tokens of one sequence.

Tokens of a sequence share their prompt, their KV and their fate, so they are not independent; sequences are.
Every token carries the id of its sequence, and results come in the order of increasing id.
"""

import numpy as np
import numpy.typing as npt

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import Floats, same_shape, vector


def sequence_sums(values: npt.ArrayLike, sequence_ids: npt.ArrayLike) -> Floats:
    """Σ over the tokens of each sequence; tokens of different sequences may be interleaved."""
    array = vector("values", values)
    ids = np.asarray(sequence_ids)
    if ids.dtype.kind not in "iu":
        raise InvalidValue(
            f"sequence ids have type {ids.dtype}; give each token the integer id of its sequence"
        )
    same_shape("values", array, "sequence ids", ids)
    if ids.min() < 0 or ids.max() >= ids.size:
        ids = np.unique(ids, return_inverse=True)[1]
    # Ids that count sequences need no sort, which takes 40 bytes a token.
    places = ids.astype(np.intp, copy=False)
    sums: Floats = np.bincount(places, weights=array).astype(np.float64, copy=False)
    return sums[np.bincount(places) > 0]
