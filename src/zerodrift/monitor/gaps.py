"""Three gaps out of four sets of logprobs, as sums that ranks can add.

    mismatch    rescored - behavior                     the trainer's forward under the weights that made the token
                                                        (where only some were scored again: of those),
                old - behavior, of tokens of lag 0      or its newest, where those are the same weights
    staleness   old - rescored                          one forward, two sets of weights
    update      current - old

Where no old logprobs are given the current ones are those of `trainer_version`, and stand in for them. A difference that
is the sum of two gaps is not called by the name of either; it is `total`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.drift.summary import DriftSummary
from zerodrift.monitor.decision import Gap, GapView, Measured, NotObservable
from zerodrift.monitor.intake import RESCORED, Tokens
from zerodrift.stats.arrays import Bools, Reals
from zerodrift.stats.ratios import WeightSums

BEHAVIOR = "behavior_logprobs"


class GapSums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is kept of one gap in one batch; `+` is both batches together."""

    summary: DriftSummary = DriftSummary()
    sequences: WeightSums | None = None
    """Of whole sequences, each weighted by the product of its ratios."""
    below: int = 0
    above: int = 0
    why: str = ""
    """Why it is not observable; empty where it is."""

    def __add__(self, other: "GapSums") -> "GapSums":
        """Tokens of both; one that shows the gap is enough to see it."""
        summary = self.summary + other.summary
        return GapSums(
            summary=summary,
            sequences=_together(self.sequences, other.sequences),
            below=self.below + other.below,
            above=self.above + other.above,
            why="" if summary.count else self.why or other.why,
        )

    def view(self) -> GapView:
        """The numbers that people read."""
        if not self.summary.count or self.sequences is None:
            return NotObservable(self.why)
        all_of = self.summary
        return Measured(
            tokens=all_of.count,
            bias=all_of.signed_mean,
            mean_abs=all_of.mean,
            p50=all_of.quantile(0.5),
            p90=all_of.quantile(0.9),
            p99=all_of.quantile(0.99),
            max=all_of.max,
            k1=all_of.k1,
            k2=all_of.k2,
            k3=all_of.k3,
            mean_ratio=all_of.mean_ratio,
            token_ess=all_of.ess,
            sequence_ess=self.sequences.ess,
            clipped_below=self.below / all_of.count,
            clipped_above=self.above / all_of.count,
        )


def _together(first: WeightSums | None, second: WeightSums | None) -> WeightSums | None:
    if first is None or second is None:
        return first or second
    top = max(first.log_largest, second.log_largest)
    one, other = first.at(top), second.at(top)
    return WeightSums(one.size + other.size, top, one.total + other.total, one.squares + other.squares)


class Difference(NamedTuple):
    """Two sets of logprobs of the same tokens. Δ is made of them block by block, and never held whole."""

    later: Reals
    """By them tokens are told rare from certain."""
    earlier: Reals
    chosen: Bools | None = None
    """Which tokens of the batch show the gap; None for all."""


def differences(tokens: Tokens) -> dict[Gap | None, Difference | str]:
    """Each gap's Δ, or why it cannot be seen; None is the total."""
    given = tokens.logprobs
    # What is the engine's own array shows nothing of the trainer.
    own = {
        name: values
        for name, values in given.items()
        if frozenset((BEHAVIOR, name)) not in tokens.handed_twice
    }
    behavior, rescored = given.get(BEHAVIOR), own.get(RESCORED)
    began = "old_logprobs" if "old_logprobs" in given else "current_logprobs"
    old = own.get(began)
    newest = own.get("current_logprobs" if "current_logprobs" in given else began)
    twice = frozenset((began, RESCORED)) in tokens.handed_twice
    if twice and tokens.lag is not None and tokens.rescored is None:
        # The numbers of now, under another name: of tokens of lag 0 they are shown anyway.
        rescored = None
    nothing = _nothing(given, own)
    found: dict[Gap | None, Difference | str] = {
        Gap.MISMATCH: nothing if behavior is None else _mismatch(tokens, behavior, old, rescored) or nothing,
        Gap.STALENESS: _staleness(tokens, old, rescored),
        Gap.UPDATE: "give old_logprobs and current_logprobs: the trainer's, before and after its updates",
        None: nothing,
    }
    if "old_logprobs" in given and "current_logprobs" in given:
        found[Gap.UPDATE] = Difference(given["current_logprobs"], given["old_logprobs"])
    if behavior is not None and newest is not None:
        mismatch = found[Gap.MISMATCH]
        alone = isinstance(mismatch, Difference) and mismatch.chosen is None and mismatch.later is newest
        found[None] = mismatch if alone else Difference(newest, behavior)
    return found


def _nothing(given: Mapping[str, Reals], own: Mapping[str, Reals]) -> str:
    """Why nothing can be compared, where nothing can."""
    if BEHAVIOR not in given:
        return "no behavior_logprobs were given"
    if taken := [name for name in given if name not in own and name != BEHAVIOR]:
        return (
            f"{', '.join(taken)} are the very array that was given as behavior_logprobs, and a trainer that takes the engine's numbers "
            "for its own is compared with nothing; give its own forward"
        )
    return "no logprobs of the trainer were given"


def _mismatch(
    tokens: Tokens, behavior: Reals, old: Reals | None, rescored: Reals | None
) -> Difference | str | None:
    if rescored is not None:
        return _of_rescored(tokens, behavior, old, rescored)
    if old is None:
        return None
    if tokens.lag is None:
        return "versions are unknown, so old weights and drift cannot be told apart; give versions, or rescored_logprobs"
    fresh = tokens.fresh
    if fresh is None:
        return Difference(old, behavior)
    if not fresh.any():
        return "every token was made by older weights; re-score some under their own (rescored_logprobs), or run a canary"
    return Difference(old, behavior, fresh)


def _of_rescored(tokens: Tokens, behavior: Reals, old: Reals | None, rescored: Reals) -> Difference:
    """Of the tokens that were scored again, and of those that the trainer's own weights made."""
    chosen = tokens.rescored
    if chosen is None or old is None or tokens.lag is None:
        return Difference(rescored, behavior, chosen)
    later: Reals = np.where(chosen, rescored, old)
    return Difference(later, behavior, chosen | (tokens.lag == 0))


def _staleness(tokens: Tokens, old: Reals | None, rescored: Reals | None) -> Difference | str:
    if old is None or rescored is None:
        return "give rescored_logprobs: the trainer's forward under the weights that made each token"
    if tokens.lag is not None and tokens.fresh is None:
        return "every token was made by the trainer's own weights"
    if tokens.rescored is not None:
        return "only some tokens were scored again; give rescored_logprobs of all"
    return Difference(old, rescored)
