"""Does a trainer's scorer mean something else by a logprob: its neighbour's, or one at some temperature?"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import entries
from zerodrift.stats.arrays import Floats

EXPLAINED = 0.95
"""Share of the difference that another meaning must take away: a true one leaves rounding."""
COLDEST, HOTTEST = 0.05, 20.0
MOST_SEQUENCES, MOST_TOKENS = 2, 128
"""That a temperature is fitted on: a row of logits is 600 kB where 151,936 words are known."""


class Meaning(NamedTuple):
    """What the numbers are instead."""

    cause: str
    message: str
    explained: float


def other_meaning(
    reference: ReferenceBackend,
    sequences: Sequence[tuple[int, ...]],
    theirs: Sequence[Floats],
    ours: Sequence[Floats],
) -> Meaning | None:
    """What explains `theirs`, scores of tokens 1… of each sequence; None where nothing here does."""
    return _shifted(theirs, ours) or _at_a_temperature(reference, sequences, theirs, ours)


def _shifted(theirs: Sequence[Floats], ours: Sequence[Floats]) -> Meaning | None:
    for step, whose in ((1, "before"), (-1, "after")):
        moved = [
            (one[1:], one_right[1:], one_right[:-1])
            if step == 1
            else (one[:-1], one_right[:-1], one_right[1:])
            for one, one_right in zip(theirs, ours, strict=True)
        ]
        told, right, neighbours = (np.concatenate(part) for part in zip(*moved, strict=True))
        if (share := _share(told, right, neighbours)) >= EXPLAINED:
            message = (
                f"each logprob is that of the token {whose} it: that explains {share:.1%} of the difference"
            )
            return Meaning("semantic/off-by-one", message, share)
    return None


def _at_a_temperature(
    reference: ReferenceBackend,
    sequences: Sequence[tuple[int, ...]],
    theirs: Sequence[Floats],
    ours: Sequence[Floats],
) -> Meaning | None:
    few = sequences[:MOST_SEQUENCES]
    starts = [max(1, len(ids) - MOST_TOKENS) for ids in few]
    rows = list(reference.teacher.logits(few, starts))
    pairs = zip(starts, zip(theirs, ours, strict=False), strict=False)
    told, right = (
        np.concatenate(part)
        for part in zip(
            *((one[start - 1 :], other[start - 1 :]) for start, (one, other) in pairs), strict=True
        )
    )

    def at(temperature: float) -> Floats:
        scored = [
            entries(logits_TV / temperature, ids[start:]).double().numpy()
            for logits_TV, ids, start in zip(rows, few, starts, strict=True)
        ]
        return np.concatenate(scored)

    fitted = minimize_scalar(
        lambda log: float(np.abs(told - at(float(np.exp(log)))).sum()),
        bounds=(np.log(COLDEST), np.log(HOTTEST)),
        method="bounded",
    )
    temperature = float(np.exp(fitted.x))
    if (share := _share(told, right, at(temperature))) < EXPLAINED:
        return None
    message = f"every logprob is taken at temperature {temperature:.3g}: that explains {share:.1%} of the difference"
    return Meaning("semantic/temperature", message, share)


def _share(told: Floats, right: Floats, instead: Floats) -> float:
    """Of the difference from `right`, that is gone where `instead` is right."""
    whole = float(np.abs(told - right).sum())
    return 1 - float(np.abs(told - instead).sum()) / whole if whole else 0.0
