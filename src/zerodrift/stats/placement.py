"""Where in their distributions did the tokens fall?

Lay the tokens of a distribution side by side on [0, 1), each as wide as its probability, in any fixed order. A point
drawn evenly from the sampled token's piece is uniform if the token was drawn as claimed, and independent of all that
came before (Rosenblatt's transform). The martingale of `stats.martingale` sees sharper and flatter sampling; this sees
what is equally sharp and still wrong: a preference for middling tokens, a biased generator, one number for all draws.
"""

import math

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import special

from zerodrift.core.errors import InvalidValue
from zerodrift.stats.arrays import same_shape, vector

BINS = 16
LEAST_PER_BIN = 5
"""Below it a chi-square statistic is not yet one."""


class Uniformity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pearson's test of equal bins; vacuous where the points are too few for them."""

    points: int
    chi_square: float
    p_value: float
    vacuous: bool


class SerialDependence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a point says something about the next one of its sequence."""

    pairs: int
    z: float
    """Positive: neighbours lie close together."""
    p_value: float
    """Two-sided."""
    vacuous: bool


def uniformity(points: npt.ArrayLike) -> Uniformity:
    """Test that points are spread evenly over [0, 1]."""
    array = _unit("points", points)
    if array.size < BINS * LEAST_PER_BIN:
        return Uniformity(points=array.size, chi_square=0.0, p_value=1.0, vacuous=True)
    counts = np.bincount(np.minimum((array * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    expected = array.size / BINS
    statistic = float(((counts - expected) ** 2).sum() / expected)
    p_value = float(special.chdtrc(BINS - 1, statistic))
    return Uniformity(points=array.size, chi_square=statistic, p_value=p_value, vacuous=False)


def serial_dependence(points: npt.ArrayLike, follows: npt.ArrayLike) -> SerialDependence:
    """Test neighbours: `follows[i]` says that point i stands right behind point i - 1 in one sequence.

    Around their own mean and in their own spread, so that points which are merely not even do not count as dependent.
    Products of independent centred points are martingale differences.
    """
    array, behind = _unit("points", points), np.asarray(follows)
    same_shape("points", array, "follows", behind)
    if behind.dtype != np.bool_ or (behind.size and behind[0]):
        raise InvalidValue(
            "follows says for each point whether it stands behind the one before; the first does not"
        )
    centred, spread = array - array.mean(), float(array.var())
    products = centred[1:][behind[1:]] * centred[:-1][behind[1:]]
    if products.size < BINS * LEAST_PER_BIN or spread == 0:
        return SerialDependence(pairs=products.size, z=0.0, p_value=1.0, vacuous=True)
    z = float(products.sum()) / (spread * math.sqrt(products.size))
    return SerialDependence(pairs=products.size, z=z, p_value=math.erfc(abs(z) / math.sqrt(2)), vacuous=False)


def _unit(name: str, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = vector(name, values)
    if array.min() < 0 or array.max() > 1:
        raise InvalidValue(f"{name} reach from {array.min()} to {array.max()}; they lie in [0, 1]")
    return array
