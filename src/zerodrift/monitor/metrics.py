"""A decision as flat numbers under `zerodrift/…`, for dashboards that know nothing but names and values.

A number that the batch could not show is left out, and `…/observable` is 0: a 0 that nobody measured looks healthy on
every dashboard. So is one that is not finite; the decision's reasons say so in words.
"""

import math
from collections.abc import Iterator, Mapping

from zerodrift.monitor.decision import Decision, GapView, Measured, State

PREFIX = "zerodrift/"
LEVELS = {State.OK: 0, State.WARN: 1, State.QUARANTINE: 2, State.HALT: 3}
GAPS = {
    "mismatch": "engine against trainer at equal weights",
    "staleness": "weights of the token against weights of the step",
    "update": "what learning did since the step began",
    "total": "trainer's newest against the engine's: what a loss without separate terms sees",
}
OF_A_GAP = {
    "observable": "1 where the batch could show it, else 0 and none of the others",
    "mean_abs": "mean |Δ| in nats",
    "bias": "mean Δ in nats",
    "p99": "99 % quantile of |Δ|",
    "max": "largest |Δ|",
    "k3": "k3 estimate of the KL, in nats per token",
    "mean_ratio": "mean of exp(Δ), unclamped; 1 if tokens were drawn from what was reported",
    "token_ess": "effective sample size of tokens, as a share",
    "sequence_ess": "the same of whole sequences",
    "clip_rate": "share of ratios outside the trainer's 1 ± ε",
}
OF_THE_TOTAL = ("observable", "mean_abs", "max", "mean_ratio", "token_ess", "sequence_ess")
"""It is often the mismatch once more, so it has the few names that a loss is judged by."""


def names_of(gap: str) -> tuple[str, ...]:
    """Which of `OF_A_GAP` it has."""
    return OF_THE_TOTAL if gap == "total" else tuple(OF_A_GAP)


MEANINGS: Mapping[str, str] = {
    "state": "0 OK, 1 WARN, 2 QUARANTINE, 3 HALT",
    "kept_back": "1 where the batch was not trained on",
    "reasons": "how many things are not as they should be, warnings included",
    "tokens": "tokens that were judged",
    "sequences": "sequences that were judged",
    **{f"{gap}/{name}": OF_A_GAP[name] for gap in GAPS for name in names_of(gap)},
    "entropy": "-mean log p of the sampled tokens",
    "lag/mean": "versions that a token is old",
    "lag/max": "the oldest",
    "baseline/mean_abs": "what is expected of tokens as likely as these",
    "baseline/growth": "how far the level has followed the policy; 1 is where it began",
    "ratio/raw_mean": "of the ratios before the correction that the monitor was told of",
    "ratio/raw_max": "the largest of them",
    "ratio/corrected_mean": "after it",
    "ratio/changed": "share of tokens that the correction changed: what it hides",
    "reward/mean": "of this batch",
    "reward/baseline_mean": "of the window before",
    "reward/baseline_margin": "the mean of a batch this far from it would be a shift",
    "reward/misbound": "rewards refused so far because they belong to another output",
    "kl_estimate": "as log_step was given it: engine against trainer at equal weights",
    "reference_kl": "as it was given; trips nothing",
}
"""Every name, without its prefix."""


def metrics_of(decision: Decision) -> dict[str, float]:
    """What there is to say of one batch, by full name."""
    return {
        PREFIX + name: float(value)
        for name, value in _numbers(decision)
        if value is not None and math.isfinite(value)
    }


def _numbers(decision: Decision) -> Iterator[tuple[str, float | None]]:
    yield "state", LEVELS[decision.state]
    yield "kept_back", not decision.train
    yield "reasons", len(decision.reasons)
    yield "tokens", decision.tokens
    yield "sequences", decision.sequences
    for gap in GAPS:
        yield from _gap(gap, getattr(decision, gap))
    yield "entropy", decision.entropy
    yield "lag/mean", decision.lag_mean
    yield "lag/max", decision.lag_max
    if decision.baseline is not None:
        yield "baseline/mean_abs", decision.baseline.mean_abs
        yield "baseline/growth", decision.baseline.growth
    if decision.ratios is not None:
        for name in ("raw_mean", "raw_max", "corrected_mean", "changed"):
            yield f"ratio/{name}", getattr(decision.ratios, name)
    if decision.rewards is not None:
        if decision.rewards.count:
            yield "reward/mean", decision.rewards.mean
        yield "reward/baseline_mean", decision.rewards.baseline_mean
        yield "reward/baseline_margin", decision.rewards.baseline_margin
        yield "reward/misbound", decision.rewards.misbound
    yield "kl_estimate", decision.kl_estimate
    yield "reference_kl", decision.reference_kl


def _gap(gap: str, view: GapView) -> Iterator[tuple[str, float | None]]:
    yield f"{gap}/observable", view.observable
    if isinstance(view, Measured):
        for name in names_of(gap):
            if name != "observable":
                yield f"{gap}/{name}", getattr(view, name)
