"""Do two samples have one mean, where nothing but mean, spread and size of each is known?

Student's test with one spread for both: the null is that both come from one distribution, as in `twosample`, and a
sample of a few equal values must not pass for one without spread. Both count as many values as the smaller has. The
larger would narrow the interval by a factor of at most √2, and costs more than it brings: of rewards that are 1 in 99 of
100 cases, 20 against 200, it takes 29 healthy pairs in 10,000 for different at a level of 1, and this 2. Over rewards of
0 and 1, equally or rarely solved, and exponential ones, 20 to 200 of each, the most that was seen is 2.5 in 10,000.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy import special

from zerodrift.core.errors import InvalidValue

CONFIDENCE = 0.95
_TIE = 1e-12


class Summary(NamedTuple):
    """A sample, by what is left of it."""

    mean: float
    std: float
    """With n - 1 below."""
    n: int


class Shift(NamedTuple):
    """How far one mean lies from another."""

    difference: float
    low: float
    high: float
    """Ends of the interval that covers the truth with CONFIDENCE."""
    p_value: float
    spread: float
    """Of single values, in both samples together; with 0, all of each are equal."""


def merged(samples: Sequence[Summary]) -> Summary:
    """Repeated runs as one: the mean of all values, their spread within and between runs, the size of the largest.

    Runs of one configuration ask the same questions: together they know each answer better, and know no more questions.
    """
    if not samples:
        raise InvalidValue("there is no sample to merge; give at least one")
    total = sum(sample.n for sample in samples)
    mean = math.fsum(sample.n * sample.mean for sample in samples) / total
    squares = math.fsum(
        (sample.n - 1) * sample.std**2 + sample.n * (sample.mean - mean) ** 2 for sample in samples
    )
    return Summary(mean, math.sqrt(squares / (total - 1)), max(sample.n for sample in samples))


def mean_shift(now: Summary, then: Summary) -> Shift:
    """mean(now) - mean(then), two-sided."""
    degrees = now.n + then.n - 2
    squares = (now.n - 1) * now.std**2 + (then.n - 1) * then.std**2
    # What only rounding sets apart is equal: a hundred rewards of 0.1 have a mean of 0.09999999999999999.
    difference, spread = (
        value if abs(value) > _TIE * max(abs(now.mean), abs(then.mean)) else 0.0
        for value in (now.mean - then.mean, math.sqrt(squares / degrees))
    )
    error = spread * math.sqrt(2 / min(now.n, then.n))
    margin = float(special.stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    p_value = 2 * float(special.stdtr(degrees, -abs(difference) / error)) if error else float(not difference)
    return Shift(difference, difference - margin, difference + margin, p_value, spread)
