"""Which account of the engine's behaviour does the data prefer?

Forward selection: start from a healthy engine, try every single change, keep the one that the data prefers most,
and go on until nothing pays for itself. Two channels of evidence are added up, in nats:

    reported   sum of log(1 + (rᵢ / sᵢ)²), where rᵢ is reported minus predicted and sᵢ the token's rounding scale:
               a Cauchy log-likelihood, which a few wild tokens cannot dominate
    sampled    minus the log-likelihood of the sampled tokens under the distribution they would have been drawn
               from: this is what tells raw logprobs from a changed temperature, and finds what raw logprobs hide

A change must gain more than `PRICE`, plus `PRICE_PER_PARAMETER` for each fitted value. docs/attribution.md has the
mathematics and says which causes cannot be told apart.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from zerodrift.audit.counterfactual.account import Account, Hypothesis
from zerodrift.audit.counterfactual.evaluate import Case, Evaluator, Prediction
from zerodrift.stats.intervals import bootstrap_ratio

Floats = NDArray[np.float64]
Propose = Callable[[Account, Callable[[Account], float]], Iterable[Hypothesis]]

PRICE = 12.0
"""Nats: one chance in e¹² ≈ 160,000 per candidate tried, which pays for trying about a hundred."""
PRICE_PER_PARAMETER = 4.0
SCALE = 3.0
"""Rounding scales are estimates from a few variants; three of them is still rounding."""
AT_FLOOR = 4.0
"""Residuals with a median below this many σ are rounding: nothing is left to explain."""
MAX_CAUSES = 4


class Finding(msgspec.Struct, frozen=True):
    """One cause with the evidence for it."""

    cause: str
    says: str
    explained: float
    """Share of the residual that this change removed, counted from what was there before it."""
    interval: tuple[float, float]
    gain_nats: float
    channel: str
    """Which evidence carried it: `reported` or `sampled`."""


class Attribution(msgspec.Struct, frozen=True):
    """The selected account, its causes in the order they were found, and what is left."""

    findings: tuple[Finding, ...]
    residual_sigmas: float
    """Median |residual| / σ under the selected account."""
    residual_mean: float
    explained_to_floor: bool


class Costs:
    """Scores accounts on one evaluator; every account is evaluated once."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Keeps predictions, because selection asks again for what fitting has tried."""
        self.evaluator = evaluator
        self.cases = evaluator.cases
        self._known: dict[bytes, list[Prediction]] = {}

    def predictions(self, account: Account) -> list[Prediction]:
        """Predictions of `account`, computed at most once."""
        key = msgspec.json.encode(account)
        if key not in self._known:
            self._known[key] = self.evaluator.predict(account)
        return self._known[key]

    def channels(self, account: Account) -> tuple[float, float]:
        """(reported, sampled) cost in nats."""
        reported = sampled = 0.0
        for case, prediction in zip(self.cases, self.predictions(account), strict=True):
            cost = np.log1p((residual(case, prediction) / (SCALE * case.sigma)) ** 2)
            # A shifted reading says nothing about the first or last token: charge it the average.
            reported += float(np.nanmean(cost)) * len(cost) if np.isfinite(cost).any() else 0.0
            sampled -= float(prediction.sampled.sum())
        return reported, sampled

    def total(self, account: Account) -> float:
        """Both channels together."""
        return sum(self.channels(account))


def attribute(evaluator: Evaluator, propose: Propose, rng: np.random.Generator) -> Attribution:
    """Forward selection from a healthy account."""
    costs = Costs(evaluator)
    account, findings = Account(), list[Finding]()
    while len(findings) < MAX_CAUSES:
        best = _best_step(costs, account, propose)
        if best is None:
            break
        findings.append(_finding(costs, account, best, rng))
        account = best.account
    sigmas, mean = _residual_size(costs, account)
    return Attribution(tuple(findings), sigmas, mean, sigmas <= AT_FLOOR)


def residual(case: Case, prediction: Prediction) -> Floats:
    """Reported minus predicted; NaN where nothing is predicted."""
    return case.reported - prediction.reported


def _best_step(costs: Costs, account: Account, propose: Propose) -> Hypothesis | None:
    now = costs.total(account)

    def net(hypothesis: Hypothesis) -> float:
        price = PRICE + PRICE_PER_PARAMETER * hypothesis.parameters
        return now - costs.total(hypothesis.account) - price

    candidates = [(net(hypothesis), hypothesis) for hypothesis in propose(account, costs.total)]
    gain, best = max(candidates, key=lambda pair: pair[0], default=(0.0, None))
    return best if gain > 0 else None


def _finding(costs: Costs, before: Account, step: Hypothesis, rng: np.random.Generator) -> Finding:
    was, now = costs.channels(before), costs.channels(step.account)
    gains = {"reported": was[0] - now[0], "sampled": was[1] - now[1]}
    channel = max(gains, key=lambda name: gains[name])
    removed, total = _removed(costs, before, step.account, channel)
    share = bootstrap_ratio(removed, total, np.arange(len(total)), rng)
    return Finding(
        step.cause, step.says, share.estimate, (share.low, share.high), sum(gains.values()), channel
    )


def _removed(costs: Costs, before: Account, after: Account, channel: str) -> tuple[Floats, Floats]:
    """Per case: how much of |residual| (or of the excess surprise of samples) went, and how much there was."""
    removed, total = [], []
    pairs = zip(costs.cases, costs.predictions(before), costs.predictions(after), strict=True)
    for case, was, now in pairs:
        if channel == "reported":
            old, new = np.abs(residual(case, was)), np.abs(residual(case, now))
            both = np.isfinite(old) & np.isfinite(new)
            removed.append(float((old[both] - new[both]).sum()))
            total.append(float(old[both].sum()))
        else:
            # Log-likelihood gained, as a share of itself: the sampled channel has no absolute zero.
            gained = float((now.sampled - was.sampled).sum())
            removed.append(gained)
            total.append(abs(gained))
    return np.array(removed), np.array(total)


def _residual_size(costs: Costs, account: Account) -> tuple[float, float]:
    sizes: Sequence[Floats] = [
        np.abs(residual(case, prediction))
        for case, prediction in zip(costs.cases, costs.predictions(account), strict=True)
    ]
    sigmas = np.concatenate([size / case.sigma for size, case in zip(sizes, costs.cases, strict=True)])
    return float(np.nanmedian(sigmas)), float(np.nanmean(np.concatenate(sizes)))
