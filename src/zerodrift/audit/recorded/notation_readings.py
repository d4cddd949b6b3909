"""Are the numbers right, and only written down in another way? Each way is an account that predicts every one of them.

    another base       log₂ or log₁₀
    another sign       −log p, or p itself
    one place off      the number of the token before or after
    padded elsewhere   numbers moved by as many places as the other rollouts are longer
    another rollout    the numbers of a neighbour in the same step

No forward is needed: the checkpoint's own numbers are turned and moved, and held against the recorded ones. An account
is believed where it fits nine in ten of the rollouts that are off, and leaves a tenth of their difference at most. Each
predicts to the last digit what it is true of, so that stale weights or a wrong rotary base fit none of them.
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from math import log
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from zerodrift.drift.strata import Timeline
from zerodrift.stats.arrays import Floats

BASES = {2: "log2", 10: "log10"}
MOST_NATS = 30.0
"""Further off than this is excluded or absurd; a mean must stay a number."""
FEW_TOKENS = 8
"""Fewer tokens than these may fit another rollout, or another place, by chance."""
FURTHEST = 256
"""Places that numbers are looked for to either side."""
PROBE_TOKENS = 64
"""Of an output, to find the place by; the whole then has to agree."""
FITS_NINE_IN, OF_TEN = 9, 10
LEFT_OVER = 0.1
BETTER = 5.0
"""A rollout fits an account that is so many times nearer than its numbers as they stand."""
AT_GATE = 3.0
"""And within so many gates: the mean of one rollout varies more than that of all."""


class RecordedNumbers(NamedTuple):
    """Of one rollout: as recorded, and as the checkpoint has them."""

    reported: Floats
    contracted: Floats
    sign_turned: bool = False


class Notation(Enum):
    """How a number is written that is no natural logarithm of a probability."""

    BASE = auto()
    """log₂ or log₁₀."""
    SIGN = auto()
    """−log p."""
    PROBABILITY = auto()
    """p itself, which lies above zero by right."""


class NotationReading(NamedTuple):
    """One way in which the numbers may have been written."""

    cause: str
    message: str
    sizes: Floats
    """Mean |Δ| of each rollout, read so; infinite where the account says nothing about it."""
    notation: Notation | None = None
    """Where that is what is wrong: other accounts move numbers, and write them as they should be."""


class Fit(NamedTuple):
    """An account that is believed."""

    account: NotationReading
    fits: np.ndarray
    """Rollouts whose numbers it explains."""
    before: float
    after: float
    """Mean |Δ| of those, as they stand and read so."""

    @property
    def explained(self) -> float:
        """Share of the difference that goes away."""
        return 1 - self.after / self.before

    @property
    def evidence(self) -> str:
        """In words."""
        return (
            f"{self.account.message}: {int(self.fits.sum())} rollouts read so are within {self.after:.2g} of the "
            f"checkpoint, and {self.before:.2g} away as they stand"
        )


def size(delta: Floats) -> float:
    """Mean |Δ| that stays a number."""
    return float(np.minimum(np.abs(delta), MOST_NATS).mean())


def sizes_as_recorded(numbers: Sequence[RecordedNumbers]) -> Floats:
    """Mean |Δ| of every rollout."""
    return np.array([size(each.contracted - each.reported) for each in numbers])


def bases(numbers: Sequence[RecordedNumbers]) -> Iterator[NotationReading]:
    """Logarithms of another base."""
    for base, name in BASES.items():
        scaled = [size(each.contracted - each.reported * log(base)) for each in numbers]
        message = f"the numbers are {name}, not natural logarithms"
        yield NotationReading("semantic/notation", message, np.array(scaled), Notation.BASE)


def accounts(numbers: Sequence[RecordedNumbers], order: Timeline) -> Iterator[NotationReading]:
    """Every account that costs no forward."""
    yield from bases(numbers)
    if all(each.sign_turned and each.reported.min() >= -1 for each in numbers):
        # A probability below the smallest fp32 number was written as zero.
        read = [size(each.contracted - np.log(np.maximum(-each.reported, 1e-45))) for each in numbers]
        message = "the numbers are probabilities, not their logarithms"
        yield NotationReading("semantic/notation", message, np.array(read), Notation.PROBABILITY)
    for step, words in ((1, "before"), (-1, "after")):
        yield NotationReading(
            "semantic/off-by-one",
            f"each token carries the number of the one {words} it",
            np.array([_moved(each, step) for each in numbers]),
        )
    yield _moved_by_padding(numbers)
    yield _of_others(numbers, order)


def believed(found: Iterator[NotationReading], recorded: Floats, gate: float) -> Fit | None:
    """The account that fits best, if one does."""
    off = recorded > gate
    best: Fit | None = None
    for account in found:
        asked = off & np.isfinite(account.sizes)
        if not asked.any() or OF_TEN * asked.sum() < FITS_NINE_IN * off.sum():
            continue
        fits = asked & (account.sizes <= np.minimum(AT_GATE * gate, recorded / BETTER))
        left = account.sizes[asked].sum() / recorded[asked].sum()
        if OF_TEN * fits.sum() < FITS_NINE_IN * asked.sum() or left > LEFT_OVER:
            continue
        fit = Fit(account, fits, float(recorded[fits].mean()), float(account.sizes[fits].mean()))
        best = fit if best is None or fit.after < best.after / BETTER else best
    return best


def _moved(each: RecordedNumbers, step: int) -> float:
    """Mean |Δ| if number i is that of token i - step; of few tokens nothing is said."""
    here, there = (
        (each.reported[step:], each.contracted[:-step])
        if step > 0
        else (each.reported[:step], each.contracted[-step:])
    )
    return size(there - here) if len(here) >= FEW_TOKENS else np.inf


def _moved_by_padding(numbers: Sequence[RecordedNumbers]) -> NotationReading:
    """Each rollout by its own number of places."""
    steps = [_best_step(each) for each in numbers]
    sizes = np.array(
        [np.inf if step is None else _moved(each, step) for each, step in zip(numbers, steps, strict=True)]
    )
    known = [abs(step) for step in steps if step is not None]
    by = f"{min(known)} to {max(known)} places" if known else "some places"
    return NotationReading(
        "semantic/padding", f"numbers and tokens are padded on different sides, {by} apart", sizes
    )


def _best_step(each: RecordedNumbers) -> int | None:
    """By how many places the numbers are moved; None where there are too few of them to say."""
    length = len(each.reported)
    if length < 2 * FEW_TOKENS:
        return None
    count = min(PROBE_TOKENS, length // 2)
    windows = sliding_window_view(each.contracted, count)
    best = (np.inf, 0)
    # What was moved to the right is whole at the end, and what was moved to the left at the beginning.
    for first in (0, length - count):
        gaps = np.minimum(np.abs(windows - each.reported[first : first + count]), MOST_NATS).mean(axis=1)
        gaps[first] = np.inf  # not moved at all
        gaps[: max(0, first - FURTHEST)] = gaps[first + FURTHEST + 1 :] = np.inf
        best = min(best, (float(gaps.min()), first - int(np.argmin(gaps))))
    return best[1] or None


def _of_others(numbers: Sequence[RecordedNumbers], order: Timeline) -> NotationReading:
    """Each rollout with the numbers of that neighbour which fits it best."""
    sizes = np.full(len(numbers), np.inf)
    pairs = []
    for place in range(len(order.labels)):
        members = [
            index
            for index in np.flatnonzero(order.of_sequence == place).tolist()
            if len(numbers[index].reported) >= FEW_TOKENS
        ]
        for one, other in _likeliest(numbers, members):
            sizes[one] = _beside(numbers[one], numbers[other])
            pairs.append((sizes[one], one, other))
    words = "numbers are those of other rollouts"
    if pairs:
        _, one, other = min(pairs)
        words += f" of the same {order.unit} (rollout {one} has those of {other}, counted from 0)"
    return NotationReading("semantic/misbound-logprobs", words, sizes)


def _likeliest(numbers: Sequence[RecordedNumbers], members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For each of `members` the other one whose first numbers are nearest to its own."""
    if len(members) < 2:
        return
    have_MF = np.stack([numbers[index].contracted[:FEW_TOKENS] for index in members])
    for rank, index in enumerate(members):
        gaps = np.minimum(np.abs(have_MF - numbers[index].reported[:FEW_TOKENS]), MOST_NATS).mean(axis=1)
        gaps[rank] = np.inf
        yield index, members[int(np.argmin(gaps))]


def _beside(one: RecordedNumbers, other: RecordedNumbers) -> float:
    """Mean |Δ| of one rollout's numbers from the checkpoint's for another one."""
    length = min(len(one.reported), len(other.contracted))
    return size(other.contracted[:length] - one.reported[:length])
