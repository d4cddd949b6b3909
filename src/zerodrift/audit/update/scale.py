"""Was the update applied as a fraction of itself, or as a multiple? One number, fitted by turning the weights for real."""

from collections.abc import Callable

import numpy as np

from zerodrift.audit.update.parts import WHOLE, Part
from zerodrift.audit.update.seen import HALF, Seen, UpdateExplanation
from zerodrift.audit.update.weights import Move, UpdatedWeights
from zerodrift.records.evidence import LocatedEvidence
from zerodrift.stats.arrays import Floats
from zerodrift.stats.intervals import Interval, bootstrap_ratio

REFINEMENTS = 6
SAME = 1e-5
"""Steps of the share below which it is found."""
LONGEST_STEP = 0.5
HOPELESS = 0.2
"""A first guess that explains less is that of another fault: half a layer that is missing has a slope too."""
CURVED = 0.2
"""Nats by which an update moves logprobs from where on its slope is no guess: in bf16, where a fifth of each tensor's
spread is pushed, 1.4 times the update had one of 1.12, which explained nothing."""
GUESSES = (2.0, 0.5, 1.5, 0.75, 1.25, 3.0, 0.25, -1.0)
SCOUTING_TOKENS = 24
FRACTION, MULTIPLE = "weights/fraction", "weights/multiple"


def scaled(weights: UpdatedWeights, seen: Seen, rng: np.random.Generator) -> UpdateExplanation | None:
    """The share of the whole update under which the engine's numbers are right; None where there is none.

    By secants, the first from the new weights to a guess; a few forwards are enough.
    """
    whole = Part(WHOLE, tuple(weights.rows))

    def scores_at(share: float, some: Seen) -> Floats:
        return weights.score(weights.moved([Move(whole, share - 1)]), some.completions)

    share = _guess(scores_at, seen)
    last, before, scores = 1.0, seen.at_new, scores_at(share, seen)
    column = seen.at_new - seen.at_old
    for _ in range(REFINEMENTS):
        if share == last or seen.explained(scores) < HOPELESS:
            break
        column = (scores - before) / (share - last)
        step = float(
            np.clip(column @ (seen.reported - scores) / (column @ column), -LONGEST_STEP, LONGEST_STEP)
        )
        then = scores_at(share + step, seen)
        if abs(step) < SAME or seen.explained(then) <= seen.explained(scores):
            break
        last, before, share, scores = share, scores, share + step, then
    if seen.explained(scores) <= HALF:
        return None
    left = seen.reported - scores
    return account_of([(whole, share_of(share, column, left, rng))], seen.explained(scores), _r2(seen, left))


def _guess(scores_at: Callable[[float, Seen], Floats], seen: Seen) -> float:
    """The slope where the update is small; else the best of some shares, on some tokens."""
    scouts = seen.first(SCOUTING_TOKENS)
    if float(np.abs(seen.at_new - seen.at_old).mean()) < CURVED or not scouts.gap:
        return seen.slope
    return max((seen.slope, *GUESSES), key=lambda share: scouts.explained(scores_at(share, scouts)))


def share_of(share: float, column: Floats, left: Floats, rng: np.random.Generator) -> Interval:
    """How sure a share is, by tokens drawn anew: eight sequences are too few to draw from. Nothing stays nothing."""
    rest = bootstrap_ratio(column * left, column**2 + 1e-30, np.arange(len(column)), rng)
    estimate = share + rest.estimate if share else 0.0
    return Interval(
        estimate, min(share + rest.low, estimate), max(share + rest.high, estimate), rest.confidence
    )


def _r2(seen: Seen, left: Floats) -> float:
    delta = seen.reported - seen.at_new
    return 1 - float(left @ left) / float(delta @ delta)


def account_of(
    parts: list[tuple[Part, Interval]], explained: float, r2: float, doubt: str = ""
) -> UpdateExplanation:
    """In words and for programs: which parts, and what share of the update of each is there."""
    cause = _cause(parts)
    missing = [_named(part) for part, share in parts if share.estimate == 0]
    changed = [f"{in_percent(share)} of {_whose(part)}" for part, share in parts if share.estimate != 0]
    clauses = [f"{', '.join(missing)} did not arrive"] if missing else []
    clauses += [f"{' and '.join(changed)} arrived"] if changed else []
    message = f"{', and '.join(clauses)}{doubt} ({explained:.1%} of the difference)"
    located = tuple(
        LocatedEvidence(
            part=part.label,
            rows=part.rows,
            quantity="update",
            estimate=share.estimate,
            low=share.low,
            high=share.high,
            neutral=1.0,
            r2=r2,
        )
        for part, share in parts
    )
    return UpdateExplanation(cause, message, explained, located)


def in_percent(share: Interval) -> str:
    """`90.0 % [89.7, 90.3]`."""
    estimate, low, high = (round(100 * each, 1) + 0.0 for each in (share.estimate, share.low, share.high))
    return f"{estimate:.1f} % [{low:.1f}, {high:.1f}]"


def _cause(parts: list[tuple[Part, Interval]]) -> str:
    _, share = parts[0]
    if share.estimate == 0:
        return "weights/partial" if all(each.rows is None for each, _ in parts) else "weights/rows"
    return FRACTION if 0 < share.estimate < 1 else MULTIPLE


def _named(part: Part) -> str:
    return part.label if part.rows is None else f"rows {part.rows[0]}–{part.rows[1] - 1} of {part.label}"


def _whose(part: Part) -> str:
    return part.label if part.label == WHOLE else f"the update of {_named(part)}"
