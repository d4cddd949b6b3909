"""Which account of the engine's behaviour does the data prefer?

Forward selection: start from a healthy engine, try every single change, keep the one that the data prefers most,
and go on until nothing pays for itself. Two channels of evidence are added up, in nats:

    reported   sum of log(1 + (rᵢ / sᵢ)²) + log sᵢ, where rᵢ is reported minus predicted and sᵢ the token's rounding
               scale: a Cauchy log-likelihood, which a few wild tokens cannot dominate
    sampled    minus the log-likelihood of the sampled tokens under the distribution they would have been drawn
               from: this is what tells raw logprobs from a changed temperature, and finds what raw logprobs hide

A change must gain more than `PRICE`, plus `PRICE_PER_PARAMETER` for each fitted value. docs/attribution.md has the
mathematics and says which causes cannot be told apart.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.counterfactual.evaluate import Evaluator, Prediction
from zerodrift.audit.counterfactual.explanation import Explanation, Hypothesis
from zerodrift.audit.counterfactual.rounding import is_rounding
from zerodrift.audit.response.answer import Localisation
from zerodrift.stats.arrays import Bools, Floats
from zerodrift.stats.intervals import FEWEST_SEQUENCES, bootstrap_mean, bootstrap_ratio

EVERYWHERE = slice(None)
Propose = Callable[[Explanation], Iterable[Hypothesis]]

PRICE = 12.0
"""Nats: one chance in e¹² ≈ 160,000 per candidate tried, which pays for trying about a hundred."""
PRICE_PER_PARAMETER = 4.0
AT_FLOOR = 4.0
"""Residuals with a median below this many σ are rounding: nothing is left to explain."""
FAR_OFF = 100.0
"""No token of a healthy engine was seen more than 20 σ away, in fp32 or bf16."""
MAX_CAUSES = 4
MOST_NAMED = 2
"""Changes that together may be a name. Faults come in pairs, which are told apart; with three or more fitted changes a
curve can be followed that is none of them."""
LEAST_SHARE = 0.05
"""A change must remove this share of what is left to be worth a name."""


class Channels(NamedTuple):
    """Cost in nats, by kind of evidence."""

    reported: float
    sampled: float


class Channel(StrEnum):
    """What speaks for a cause: the reported numbers, the sampled tokens, or no more than the size of Δ."""

    REPORTED = "reported"
    SAMPLED = "sampled"
    SIZE = "size"


class SelectedCause(msgspec.Struct, frozen=True):
    """One cause with the evidence for it."""

    cause: str
    message: str
    explained: float
    """Share of the residual that this change removed, counted from what was there before it, in sequences that were
    chosen by chance."""
    interval: tuple[float, float]
    """From 0 to 1 where nothing is known of it: with fewer than twenty such sequences."""
    sequences: int
    """How many the share was estimated on; 0: none of them shows the difference, and the share is that of the worst."""
    gain_nats: float
    channel: Channel
    """Which evidence carried it."""

    @property
    def by_size(self) -> bool:
        """Only the size of Δ speaks for it."""
        return self.channel is Channel.SIZE


class Attribution(msgspec.Struct, frozen=True):
    """The selected explanation, its causes in the order they were found, and what is left."""

    selected: tuple[SelectedCause, ...]
    residual_sigmas: float
    """Median |residual| / σ under the selected explanation."""
    explained_to_floor: bool
    response: Localisation | None = None
    """What linear response says, where it was asked: rounding by size has no name without it."""
    explanation: Explanation = Explanation()
    """What was selected, as one account."""
    tried_outright: int = 0
    """Exchanged, missing and doubled parts that were tried, none of which explains every number."""

    @property
    def by_value(self) -> bool:
        """Every number is predicted: nothing is left to ask."""
        return self.explained_to_floor and not any(each.by_size for each in self.selected)


class Costs:
    """Scores accounts on one evaluator; every account is evaluated once."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Keeps predictions, because selection asks again for what fitting has tried."""
        self.evaluator = evaluator
        self._known: dict[Explanation, Prediction] = {}

    def prediction(self, explanation: Explanation) -> Prediction:
        """Predictions of `explanation`, computed at most once."""
        if explanation not in self._known:
            self._known[explanation] = self.evaluator.predict(explanation)
        return self._known[explanation]

    def residual(self, explanation: Explanation) -> Floats:
        """Reported minus predicted; NaN where nothing is predicted."""
        return self.evaluator.reported - self.prediction(explanation).reported

    def channels(self, explanation: Explanation) -> Channels:
        """Cost in nats, by kind of evidence."""
        scale = self.evaluator.scale(explanation)
        widened = np.log(scale / self.evaluator.sigma)
        cost = np.log1p((self.residual(explanation) / scale) ** 2) + widened
        said = cost[np.isfinite(cost)]
        # A shifted reading says nothing about the first or last token: charge it the average. One that says nothing
        # at all, because every output is one token long, explains nothing.
        reported = float(said.mean()) * len(cost) if len(said) else np.inf
        return Channels(reported, -float(self.prediction(explanation).sampled.sum()))

    def total(self, explanation: Explanation) -> float:
        """Both channels together."""
        return sum(self.channels(explanation))

    def z(self, explanation: Explanation, where: Bools | slice = EVERYWHERE) -> float:
        """How far the samples are from the distribution they would have been drawn from."""
        entropy, variance = self.evaluator.surprise(explanation)
        steps = self.prediction(explanation).sampled + entropy
        return float(steps[where].sum() / np.sqrt(max(float(variance[where].sum()), 1e-12)))

    def at_floor(self, explanation: Explanation) -> bool:
        """Nine in ten tokens are predicted to within rounding, and none is far from it.

        Both, because a fault may touch one token of each sequence: an end of sequence without its logprob.
        """
        sigmas = self.sigmas(explanation)
        return float(np.nanquantile(sigmas, 0.9)) <= AT_FLOOR and float(np.nanmax(sigmas)) <= FAR_OFF

    def leaves_nothing(self, explanation: Explanation) -> bool:
        """At the floor on average too: one in ten may be off a little, and not carry on what all of them had."""
        return self.at_floor(explanation) and float(np.nanmean(self.sigmas(explanation))) <= AT_FLOOR

    def rounds(self, explanation: Explanation) -> bool:
        """What `explanation` leaves over is what its rounding would leave, token by token."""
        scale = self.evaluator.scale(explanation)
        return is_rounding(self.residual(explanation), scale, self.evaluator.reported)

    def sigmas(self, explanation: Explanation) -> Floats:
        """|residual| in units of σ."""
        return np.abs(self.residual(explanation)) / self.evaluator.scale(explanation)


def attribute(costs: Costs, propose: Propose, rng: np.random.Generator) -> Attribution:
    """Forward selection from a healthy explanation."""
    explanation, findings = Explanation(), list[SelectedCause]()
    while len(findings) < MAX_CAUSES:
        best = _best_step(costs, explanation, propose)
        if best is None:
            break
        step = _Step(costs, explanation, best)
        # In all cases: of a rare fault those chosen by chance may show nothing.
        if step.share(np.ones(len(costs.evaluator.reported), dtype=bool)) < LEAST_SHARE:
            break
        findings.append(step.finding(rng))
        explanation = best.explanation
    return Attribution(
        tuple(findings),
        float(np.nanmedian(costs.sigmas(explanation))),
        len(findings) <= MOST_NAMED and costs.leaves_nothing(explanation),
        explanation=explanation,
    )


def _best_step(costs: Costs, explanation: Explanation, propose: Propose) -> Hypothesis | None:
    now = costs.total(explanation)

    def net(hypothesis: Hypothesis) -> float:
        price = PRICE + PRICE_PER_PARAMETER * hypothesis.parameters
        return now - costs.total(hypothesis.explanation) - price

    candidates = [
        (net(hypothesis), hypothesis)
        for hypothesis in propose(explanation)
        if hypothesis.explanation.rounding == explanation.rounding or costs.rounds(hypothesis.explanation)
    ]
    gain, best = max(candidates, key=lambda pair: pair[0], default=(0.0, None))
    return best if gain > 0 else None


class _Step:
    """One change that the data prefers, and how much of the difference it takes away."""

    def __init__(self, costs: Costs, before: Explanation, change: Hypothesis) -> None:
        """From the explanation `before` to that of `change`."""
        self._costs, self._before, self._change = costs, before, change
        was, now = costs.channels(before), costs.channels(change.explanation)
        self._gains = Channels(was.reported - now.reported, was.sampled - now.sampled)
        self._in_numbers = self._gains.reported >= self._gains.sampled
        self._rounds = change.explanation.rounding != before.rounding

    def share(self, where: Bools) -> float:
        """Share of the difference that is removed in the tokens `where`."""
        if self._in_numbers:
            removed, whole = self._removed(where)
            return float(removed.sum() / whole.sum()) if len(whole) else 0.0
        z_was, z_now = (
            self._costs.z(explanation, where) for explanation in (self._before, self._change.explanation)
        )
        return max(0.0, 1 - abs(z_now) / max(abs(z_was), 1e-9))

    def finding(self, rng: np.random.Generator) -> SelectedCause:
        """The cause, with its share in the sequences that were chosen by chance."""
        evaluator, change = self._costs.evaluator, self._change
        where = evaluator.at_random
        if self._in_numbers and not (self._costs.sigmas(self._before)[where] > AT_FLOOR).any():
            # Rounding is all that they show, and a share of rounding says nothing about the cause.
            where = np.zeros_like(where)
        sequences = len(np.unique(evaluator.case_ids[where]))
        explained = self.share(where if sequences else ~where)
        interval = self._interval(where, explained, rng) if sequences >= FEWEST_SEQUENCES else (0.0, 1.0)
        channel = Channel.SIZE if self._rounds else Channel.REPORTED
        channel = channel if self._in_numbers else Channel.SAMPLED
        return SelectedCause(
            change.cause, change.message, explained, interval, sequences, sum(self._gains), channel
        )

    def _interval(self, where: Bools, explained: float, rng: np.random.Generator) -> tuple[float, float]:
        ids = self._costs.evaluator.case_ids
        if self._in_numbers:
            share = bootstrap_ratio(*self._removed(where), ids[where & self._known], rng)
            return share.low, share.high
        sampled = (
            self._costs.prediction(explanation).sampled
            for explanation in (self._change.explanation, self._before)
        )
        per_token = bootstrap_mean(np.subtract(*sampled)[where], ids[where], rng)
        # The tokens' log-likelihood must rise with confidence; the share is that of the z score it took away.
        return explained * (per_token.low > 0), explained

    @property
    def _known(self) -> Bools:
        """Tokens of which both accounts say something."""
        sizes = (
            self._costs.residual(explanation) for explanation in (self._before, self._change.explanation)
        )
        return np.isfinite(np.add(*sizes))

    def _removed(self, where: Bools) -> tuple[Floats, Floats]:
        """What is taken from |residual|, and what it was."""
        where = where & self._known
        old = np.abs(self._costs.residual(self._before))
        if self._rounds:
            # Coarser rounding predicts no value: what lies within three of its scales is explained by it.
            new = np.maximum(old - 3 * self._costs.evaluator.scale(self._change.explanation), 0.0)
        else:
            new = np.abs(self._costs.residual(self._change.explanation))
        # A resample of sequences that agree to the last bit has no difference: its share is none, not 0 / 0.
        return (old - new)[where], np.maximum(old[where], 1e-12)
