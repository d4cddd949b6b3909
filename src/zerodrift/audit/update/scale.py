"""Was the update applied as a fraction of itself, or as a multiple? One number, fitted by turning the weights for real."""

import numpy as np

from zerodrift.audit.update.parts import WHOLE, Part
from zerodrift.audit.update.seen import HALF, Account, Seen
from zerodrift.audit.update.weights import Move, UpdatedWeights
from zerodrift.records.evidence import LocatedEvidence
from zerodrift.stats.arrays import Floats
from zerodrift.stats.intervals import Interval, bootstrap_ratio

REFINEMENTS = 6
SAME = 1e-5
"""Steps of the share below which it is found."""
HOPELESS = 0.2
"""A first guess that explains less is that of another fault: half a layer that is missing has a slope too."""
FRACTION, MULTIPLE = "weights/fraction", "weights/multiple"


def scaled(weights: UpdatedWeights, seen: Seen, rng: np.random.Generator) -> Account | None:
    """The share of the whole update under which the engine's numbers are right; None where there is none.

    Secants along the whole change: by the first one, the slope, a few forwards are enough.
    """
    whole = Part(WHOLE, tuple(weights.rows))
    change = seen.at_new - seen.at_old
    share, explained = seen.slope, 0.0
    left = seen.reported - seen.at_new
    for _ in range(REFINEMENTS):
        scores = weights.score(weights.moved([Move(whole, share - 1)]), seen.completions)
        explained, left = seen.explained(scores), seen.reported - scores
        step = float(change @ left / (change @ change))
        if explained < HOPELESS or abs(step) < SAME:
            break
        share += step
    if explained <= HALF:
        return None
    return account_of([(whole, share_of(share, change, left, rng))], explained, r2=_r2(seen, left))


def share_of(share: float, column: Floats, left: Floats, rng: np.random.Generator) -> Interval:
    """How sure a share is, by tokens drawn anew: eight sequences are too few to draw from."""
    rest = bootstrap_ratio(column * left, column**2 + 1e-30, np.arange(len(column)), rng)
    return Interval(share, share + rest.low, share + rest.high, rest.confidence)


def _r2(seen: Seen, left: Floats) -> float:
    delta = seen.reported - seen.at_new
    return 1 - float(left @ left) / float(delta @ delta)


def account_of(parts: list[tuple[Part, Interval]], explained: float, r2: float, doubt: str = "") -> Account:
    """In words and for programs: which parts, and what share of the update of each is there."""
    cause = _cause(parts)
    missing = [_named(part) for part, share in parts if share.estimate == 0]
    changed = [f"{in_percent(share)} of {_whose(part)}" for part, share in parts if share.estimate != 0]
    says = [f"{', '.join(missing)} did not arrive"] if missing else []
    says += [f"{' and '.join(changed)} arrived"] if changed else []
    message = f"{', and '.join(says)}{doubt} ({explained:.1%} of the difference)"
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
    return Account(cause, message, explained, located)


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
