"""Is a difference rounding, or only as large as rounding?

Coarser rounding predicts no value, only a scale for each token, so an account that says "bf16" could swallow anything.
What rounding does, measured on testbed models whose body ran in bf16 or fp16: the median of |x|, x = Δ / scale, is 0.6
to 0.7, x has no mean and no trend on log p (below 0.15), and the scales of single tokens explain the sizes of Δ better
than one scale for all by half a nat a token. A soft cap on logits has a median of 5 and a correlation of 0.8, a doubled
adapter a median of 2, logprobs cut to two decimals lose by 0.4 nats a token.
"""

import numpy as np

from zerodrift.stats.arrays import Floats

SIZES = (0.2, 1.5)
"""Of the median |x|. Foreign kernels round in other places: half and double the size is the same thing."""
LARGEST_MEAN = 0.5
LARGEST_TREND = 0.3
"""Correlation with the parabola in log p that fits best. A line is not enough: what is left of a soft cap after a fitted
temperature has no slope, and bends."""
LEAST_PATTERN = 0.25
"""Share of what the tokens' own scales could gain over one scale for all, if they were right."""
WILD = 4.0
"""A token further out counts as this far: one must not make a mean."""


def is_rounding(difference: Floats, scale: Floats, logprobs: Floats) -> bool:
    """Whether `difference` is what rounding at `scale` leaves behind."""
    known = np.isfinite(difference) & np.isfinite(logprobs)
    sizes, scale = np.abs(difference[known]), scale[known]
    if not len(sizes) or not sizes.any():
        return False
    steps = np.clip(difference[known] / scale, -WILD, WILD)
    low, high = SIZES
    return bool(
        low <= np.median(sizes / scale) <= high
        and abs(steps.mean()) <= LARGEST_MEAN
        and _trend(steps, logprobs[known]) <= LARGEST_TREND
        and _pattern(sizes, scale)
    )


def _trend(steps: Floats, logprobs: Floats) -> float:
    """Share of the spread of `steps` that a parabola in log p follows."""
    spread, reach = float(steps.std()), float(logprobs.std())
    if spread == 0 or reach == 0:
        return 0.0
    place = (logprobs - logprobs.mean()) / reach
    followed = np.polynomial.Polynomial.fit(place, steps, deg=2)(place)
    return float(followed.std()) / spread


def _pattern(sizes: Floats, scale: Floats) -> bool:
    """Whether large differences stand where large ones are expected.

    Log-likelihoods per token of Laplace differences, with the tokens' own scales and with one for all, both fitted in
    size so that only the pattern counts. Where all scales are equal there is none to look for.
    """
    steps = sizes / scale
    tame = steps <= 10 * np.median(steps)
    sizes, scale, steps = sizes[tame], scale[tame], steps[tame]
    gained = np.log(sizes.mean()) - np.log(steps.mean()) - np.log(scale).mean()
    possible = np.log(scale.mean()) - np.log(scale).mean()
    return bool(gained >= LEAST_PATTERN * possible - 1e-9)
