"""Which tokens are drawn, when there are too many to draw?

The largest ones, because a fault that hits one token in ten thousand is what a reader looks for, and a random sample
of the rest, because the crowd must look like the crowd. The same run always draws the same points.
"""

import numpy as np
import numpy.typing as npt

MOST_POINTS = 2000
"""Of one trace: SVG stays fluid on a phone up to about 5,000 nodes a plot."""
KEPT_LARGEST = 200


def choose(sizes: npt.NDArray[np.float64], most: int = MOST_POINTS) -> npt.NDArray[np.int64]:
    """Indices into `sizes`, ascending: all of them, or the largest and a sample of the rest."""
    if sizes.size <= most:
        return np.arange(sizes.size, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    drawn = np.random.default_rng(0).choice(order[KEPT_LARGEST:], most - KEPT_LARGEST, replace=False)
    return np.sort(np.concatenate((order[:KEPT_LARGEST], drawn))).astype(np.int64)


def says(drawn: int, total: int, what: str) -> str:
    """What the page says about the choice."""
    if drawn == total:
        return f"All {total:,} {what} are drawn."
    return (
        f"Drawn: the {KEPT_LARGEST} largest of {total:,} {what} and {drawn - KEPT_LARGEST:,} of the others at "
        "random (seed 0)."
    )
