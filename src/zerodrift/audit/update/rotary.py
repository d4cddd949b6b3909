"""Were the rotary tables rebuilt with another base after the update? One number, fitted by turning the new weights for real.

No checkpoint holds these tables: an engine computes them from its configuration, and one that rebuilds its model for an
update may do so from another, or from none.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from zerodrift.audit.counterfactual.position import BASES, USUAL_BASES
from zerodrift.audit.update.seen import HALF, Seen, UpdateExplanation
from zerodrift.audit.update.weights import UpdatedWeights
from zerodrift.backends import variants
from zerodrift.models.family.rope import rope_bases
from zerodrift.records.evidence import LocatedEvidence
from zerodrift.stats.arrays import Floats

BUFFER = "weights/buffer"
REFINEMENTS = 6
NUDGE = 0.01
"""Step of log base that shows how logprobs follow it."""
LONGEST_STEP = math.log(10) / 3
SAME = 1e-6
PROMISING = 0.1
"""Share of the difference that the best look must explain before it is refined."""
SCOUTING_TOKENS = 24
ROUND = 2e-3
"""A round base within this relative distance is what was meant, where it explains as much."""

Scores = Callable[[float, Seen], Floats]
"""(log of the factor on the model's own base, tokens) to their logprobs."""


def rebased(weights: UpdatedWeights, seen: Seen) -> Iterator[UpdateExplanation]:
    """The base under which the engine's numbers are right, by type of layer where each has its own (Gemma 3)."""
    own = rope_bases(weights.new.config)
    turned = [(kind,) for kind in own] + ([tuple(own)] if len(own) > 1 else [])
    for kinds in turned:
        account = _fitted(partial(_scores, weights, {kind: own[kind] for kind in kinds}), own[kinds[0]], seen)
        if account is None:
            continue
        factor, scores = account
        explained = seen.explained(scores)
        if explained > HALF:
            yield _stated({kind: own[kind] for kind in kinds}, math.exp(factor), explained)


def _scores(weights: UpdatedWeights, own: dict[str, float], log_factor: float, some: Seen) -> Floats:
    bases = {kind: base * math.exp(log_factor) for kind, base in own.items()}
    changed: Any = variants.with_rope_bases(weights.new, bases)
    return weights.score(changed, some.completions)


def _fitted(scores_at: Scores, own: float, seen: Seen) -> tuple[float, Floats] | None:
    """By secants from the best of some looks, which are never further from a base than a sixth of a decade."""
    scouts = seen.first(SCOUTING_TOKENS)
    if not scouts.gap:
        scouts = seen
    looks = [math.log(factor) for factor in BASES]
    looks += [math.log(base / own) for base in USUAL_BASES if base != own]
    # Nearer to the right base than to any look, it shows in how numbers begin to move.
    looks.append(_step(scouts.at_new, scores_at(NUDGE, scouts), NUDGE, scouts))
    point = max(looks, key=lambda look: scouts.explained(scores_at(look, scouts)))
    if scouts.explained(scores_at(point, scouts)) < PROMISING:
        return None
    return _rounded(scores_at, own, *_refined(scores_at, point, seen), seen)


def _refined(scores_at: Scores, point: float, seen: Seen) -> tuple[float, Floats]:
    scores = scores_at(point, seen)
    nudged = NUDGE
    for _ in range(REFINEMENTS):
        step = _step(scores, scores_at(point + nudged, seen), nudged, seen)
        then = scores_at(point + step, seen)
        if abs(step) < SAME or seen.explained(then) <= seen.explained(scores):
            break
        # The next slope is that of as short a way as is left: derivatives along longer ones are those of elsewhere.
        point, scores, nudged = point + step, then, max(min(abs(step), NUDGE), 1e-4)
    return point, scores


def _step(scores: Floats, nudged: Floats, by: float, seen: Seen) -> float:
    column = (nudged - scores) / by
    step = float(column @ (seen.reported - scores) / max(float(column @ column), 1e-300))
    return float(np.clip(step, -LONGEST_STEP, LONGEST_STEP))


def _rounded(scores_at: Scores, own: float, point: float, scores: Floats, seen: Seen) -> tuple[float, Floats]:
    """People set round numbers: where one does as well as the fit, it is the better account."""
    base = own * math.exp(point)
    for digits in (1, 2, 3):
        plain = float(f"{base:.{digits}g}")
        if abs(plain / base - 1) < ROUND and plain != own:
            then = scores_at(math.log(plain / own), seen)
            if seen.explained(then) >= seen.explained(scores) - 1e-3:
                return math.log(plain / own), then
    return point, scores


def _stated(own: dict[str, float], factor: float, explained: float) -> UpdateExplanation:
    kinds = " and ".join(kind for kind in own if kind)
    where = f" in {kinds} layers" if kinds else ""
    bases = " and ".join(f"{base * factor:.6g} instead of {base:g}" for base in own.values())
    message = f"rotary tables rebuilt with a base of {bases}{where} ({explained:.1%} of the difference)"
    located = LocatedEvidence(
        part="rotary table" + (f" of {kinds}" if kinds else ""),
        quantity="base",
        estimate=factor,
        low=factor,
        high=factor,
        neutral=1.0,
        r2=max(explained, 0.0),
    )
    return UpdateExplanation(BUFFER, message, explained, (located,))
