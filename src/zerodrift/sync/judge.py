"""Is the engine at the new weights? From canary logprobs of both sides, before and after. Torch-free, and pure.

    CONFIRMED      slopes far from 1 are refused, 1 is not, and nothing else is off
    MISSED         1 is refused, a part of the update is, or the engine errs more than before; with a cause
    INCONCLUSIVE   too little is known, and how many canary tokens would do

All tests together raise a false alarm once in 10,000 updates at most (`sync/slope.py`).
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from zerodrift.core.cause import UNEXPLAINED
from zerodrift.stats.arrays import Floats, Ids
from zerodrift.sync.slope import SlopeFit, critical, excess, fit_slope, token_weights

RESOLUTION = 0.5
"""A confirmed slope lies within 1 ± this: more than half of an update that is missing, or half too much, is seen."""
WORSE = 1.5
"""Times its usual error that an engine must be off to be called worse: less is no other set of weights."""
MISSING = 0.5
"""A part of which more than this share is missing did not arrive."""
EXPLAINED = 0.8
"""Share of the squared difference that parts must explain to be named."""


class Arrival(StrEnum):
    """What a receipt says."""

    CONFIRMED = "confirmed"
    MISSED = "missed"
    INCONCLUSIVE = "inconclusive"


class CanaryScores(NamedTuple):
    """Logprobs of the same canary tokens by four: trainer and engine, before the update and after it."""

    trainer_before: Floats
    trainer_after: Floats
    engine_before: Floats
    engine_after: Floats
    sequence: Ids
    """Which canary each token belongs to, from 0."""

    @property
    def predicted(self) -> Floats:
        """What the update does by the trainer."""
        return self.trainer_after - self.trainer_before

    @property
    def observed(self) -> Floats:
        """What it did to the engine: what that always gets wrong cancels."""
        return self.engine_after - self.engine_before


class SideFacts(NamedTuple):
    """What is known beside the numbers."""

    same_digest: bool = False
    """The new weights are bit for bit the old ones."""
    settled: bool = False
    """No others were sent since the old ones were confirmed."""
    says_new: bool = False
    """The engine answers under the label of the new version."""
    answers_as: str | None = None
    """The label under which it answers; None where it shows none."""
    other_digest: bool = False
    """The engine shows the digest of its tensors, and it is not that of the new ones."""
    cached_tokens: int = 0
    """Prompt tokens, of prompts that were asked before the update, that it took from its cache afterwards."""
    gate: float | None = None
    """Mean |Δ| that the user allows."""


class CanaryFinding(NamedTuple):
    """What is made of it."""

    arrival: Arrival
    cause: str | None
    message: str
    fit: SlopeFit
    error: float
    """Mean |Δ| of engine and trainer after the update."""
    usual: float
    """The same before it."""
    needed: int | None = None
    """Canary tokens that would decide, where it is inconclusive; None where no number would."""


class Shares(NamedTuple):
    """By name, what each predicted change would lose without one share of the update."""

    parts: Mapping[str, Floats] = MappingProxyType({})
    """Layers and modules."""
    ranks: Mapping[str, Floats] = MappingProxyType({})
    """What each rank of an engine holds, which cuts tensors across all layers."""


def judge(scores: CanaryScores, shares: Shares, told: SideFacts, among: int = 1) -> CanaryFinding:
    """Did the engine take the update? `among`: how often this is asked of one update, which shares the false alarms out."""
    limit = critical(among * (3 + len(shares.parts) + len(shares.ranks)))
    fit = fit_slope(scores.predicted, scores.observed, scores.sequence, limit)
    now = np.abs(scores.engine_after - scores.trainer_after)
    before = np.abs(scores.engine_before - scores.trainer_before)
    error, usual = float(now.mean()), float(before.mean())

    errors = _Errors(error, usual, excess(now, before, scores.sequence) > limit)
    if (
        missed := _by_numbers(scores, shares, fit, told) or _by_word(told) or errors.worse(told.gate)
    ) is not None:
        return CanaryFinding(Arrival.MISSED, *missed, fit, error, usual)
    arrival, message, needed = _undisputed(fit, told)
    return CanaryFinding(arrival, None, message, fit, error, usual, needed)


class _Errors(NamedTuple):
    now: float
    usual: float
    more: bool

    def worse(self, gate: float | None) -> tuple[str, str] | None:
        """Whether the engine is off, whichever way the update goes."""
        worse = self.more and self.now > WORSE * self.usual
        if not worse and (gate is None or self.now <= gate):
            return None
        against = f"{self.usual:.3g} before the update" if worse else f"a gate of {gate:.3g}"
        message = (
            f"the engine is {self.now:.3g} away from the trainer, against {against}, and not along the update"
        )
        return UNEXPLAINED, message


def _by_numbers(
    scores: CanaryScores, shares: Shares, fit: SlopeFit, told: SideFacts
) -> tuple[str, str] | None:
    """Cause and sentence, where what was observed is not what was predicted."""
    if fit.refuses(1.0):
        return _cause(scores, shares, fit, told)
    if absent := _absent(scores, {**shares.parts, **shares.ranks}, fit.limit):
        return _partial(absent, shares)
    # Last: where no update came at all, what was cached before is as old as the rest.
    if told.cached_tokens:
        message = f"{told.cached_tokens} prompt tokens came from a cache that the old weights wrote"
        return "weights/stale-prefix-cache", message
    return None


def _by_word(told: SideFacts) -> tuple[str, str] | None:
    """Cause and sentence, where the engine itself says that it is another version."""
    if told.answers_as is not None and not told.says_new:
        return "weights/version-label", f"the engine answers under the label {told.answers_as!r}"
    if told.other_digest:
        return UNEXPLAINED, "the digest of the engine's tensors is not that of the new weights"
    return None


def _undisputed(fit: SlopeFit, told: SideFacts) -> tuple[Arrival, str, int | None]:
    """Nothing speaks against it; is what speaks for it enough?"""
    if told.same_digest and not told.settled:
        # Nothing is predicted to change, so an engine that kept what it was sent in between shows nothing.
        message = (
            "the new weights are those of the last confirmed version bit for bit, and of what was sent in between nothing is "
            "known: send other weights, and then these"
        )
        return Arrival.INCONCLUSIVE, message, None
    if told.same_digest:
        message = "the new weights are the old ones bit for bit, and the engine errs as before"
        return Arrival.CONFIRMED, message, None
    if not fit.moves:
        return Arrival.INCONCLUSIVE, "the update moves no canary token; take other canaries", None
    low, high = fit.interval
    if low > 1 - RESOLUTION and high < 1 + RESOLUTION:
        message = f"slope {fit.estimate:.3f} [{low:.3f}, {high:.3f}] over {fit.tokens} canary tokens"
        return Arrival.CONFIRMED, message, None
    needed = fit.tokens_for(RESOLUTION)
    message = (
        f"slope {fit.estimate:.2f} [{low:.2g}, {high:.2g}] tells too little with {fit.tokens} canary tokens; "
        f"about {needed} would do"
    )
    return Arrival.INCONCLUSIVE, message, needed


def _cause(scores: CanaryScores, shares: Shares, fit: SlopeFit, told: SideFacts) -> tuple[str, str]:
    """Why the slope is not 1."""
    low, high = fit.interval
    slope = f"slope {fit.estimate:.3f} [{low:.3f}, {high:.3f}]"
    if not fit.refuses(0.0):
        if told.says_new:
            return (
                "weights/version-label",
                f"the engine answers with the old weights under the new label: {slope}",
            )
        return "weights/stale", f"the engine answers with the weights from before the update: {slope}"
    if mixed := _mixed(scores, fit):
        old, total = mixed
        return "weights/replica", f"{old} of {total} canaries were answered with the old weights: {slope}"
    if absent := _explaining(scores, shares.parts) or _explaining(scores, shares.ranks):
        return _partial(absent, shares)
    cause = "weights/fraction" if fit.estimate < 1 else "weights/multiple"
    return cause, f"not once the update: {slope}"


def _partial(absent: list[str], shares: Shares) -> tuple[str, str]:
    names = ", ".join(absent)
    if shares.ranks.keys() & absent:
        return "weights/rows", f"did not arrive: what {names} holds of each tensor"
    return "weights/partial", f"did not arrive: {names}"


def _absent(scores: CanaryScores, parts: Mapping[str, Floats], limit: float) -> list[str]:
    """Shares whose own share of the change is refused, although the whole is not: the one that is refused most."""
    lacking = scores.predicted - scores.observed
    refused = {
        name: statistic
        for name, column in parts.items()
        if (statistic := fit_slope(column, lacking, scores.sequence, limit).statistic(0.0)) > limit
    }
    return [max(refused, key=refused.__getitem__)] if refused else []


def _explaining(scores: CanaryScores, parts: Mapping[str, Floats]) -> list[str]:
    """Parts without which the predicted change is the observed one."""
    if not parts:
        return []
    root = np.sqrt(token_weights(scores.predicted))
    lacking = root * (scores.predicted - scores.observed)
    columns = np.stack([root * column for column in parts.values()], axis=1)
    scale = np.sqrt((columns**2).sum(axis=0)).clip(min=1e-12)
    shares = nnls(columns / scale, lacking)[0] / scale
    absent = [number for number, share in enumerate(shares) if share > MISSING]
    if not absent or len(absent) == len(parts):
        return []
    left = lacking - columns[:, absent].sum(axis=1)
    names = list(parts)
    enough = float(left @ left) < (1 - EXPLAINED) * float(lacking @ lacking)
    return [names[number] for number in absent] if enough else []


def _mixed(scores: CanaryScores, fit: SlopeFit) -> tuple[int, int] | None:
    """How many sequences are at the old weights, where each is at one or the other and both occur."""
    p, o, sequence = scores.predicted, scores.observed, scores.sequence
    w = token_weights(p)
    at_old, at_new = np.bincount(sequence, w * o**2), np.bincount(sequence, w * (o - p) ** 2)
    between = float((w * (o - fit.estimate * p) ** 2).sum())
    old = int((at_old < at_new).sum())
    apart = float(np.minimum(at_old, at_new).sum()) < 0.5 * between
    return (old, len(at_old)) if apart and 1 < old < len(at_old) - 1 else None
