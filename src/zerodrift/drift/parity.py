"""Are the reported numbers the reference's? Mean and p90 of |Δ| decide, k3 is capped, the maximum is a veto."""

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from zerodrift.drift.gates import LEAST_TOKENS, Gates
from zerodrift.drift.reach import stable_context
from zerodrift.drift.summary import DriftSummary
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.evidence import ParityEvidence
from zerodrift.records.verdict import Outcome
from zerodrift.stats.arrays import LARGEST_LOG_RATIO
from zerodrift.stats.intervals import bootstrap_mean
from zerodrift.stats.ratios import sequence_ess


class Limit(StrEnum):
    """What a difference can break, in the words of the verdict."""

    EXCLUDED = "sampled tokens are excluded by the requested parameters"
    ABSURD = f"reported logprobs lie more than {LARGEST_LOG_RATIO:.0f} nats too low"
    MEAN = "mean |Δ|"
    P90 = "p90 |Δ|"
    K3 = "k3"
    VETO = "max |Δ|"


class Breach(NamedTuple):
    """A limit that was broken: by how many tokens, or by which value against which gate."""

    limit: Limit
    value: float
    gate: float | None = None

    def __str__(self) -> str:
        if self.gate is None:
            return f"{self.value:.0f} {self.limit}"
        return f"{self.limit} {self.value:.3g} > {self.gate:.3g}"


class Parity(NamedTuple):
    """The comparison of one table with its gates."""

    outcome: Outcome
    message: str
    evidence: ParityEvidence | None = None
    """None where too few tokens were there to compare."""
    breaches: tuple[Breach, ...] = ()


def compare(table: TokenTable, gates: Gates, rng: np.random.Generator) -> Parity:
    """Hold Δ against the gates; with fewer than LEAST_TOKENS of two sequences nothing is decided."""
    possible, delta = np.isfinite(table.contracted), table.delta
    excluded = int((~possible).sum())
    absurd = possible & (delta > LARGEST_LOG_RATIO)
    compared = possible & ~absurd
    delta, sequence = delta[compared], table.sequence[compared]
    breaches = _not_sampled(excluded, int(absurd.sum()), len(possible))
    if len(delta) < LEAST_TOKENS or len(np.unique(sequence)) < 2:
        if breaches and len(possible) >= LEAST_TOKENS:
            some = ParityEvidence(tokens=len(delta), impossible_tokens=excluded)
            return Parity(Outcome.FAIL, _joined(breaches), some, breaches)
        few = f"there are {len(delta)} from {len(np.unique(sequence))}"
        return Parity(Outcome.INCONCLUSIVE, f"needs at least {LEAST_TOKENS} tokens from 2 sequences; {few}")
    summary, stable = DriftSummary.of(delta), stable_context(table, gates)
    interval = bootstrap_mean(np.abs(delta), sequence, rng)
    # Of all tokens, where a summary's own quantiles are those of its bins.
    p90, p99 = (float(value) for value in np.quantile(np.abs(delta), (0.9, 0.99)))
    evidence = ParityEvidence(
        tokens=summary.count,
        mean=summary.mean,
        mean_low=interval.low,
        mean_high=interval.high,
        p90=p90,
        p99=p99,
        max=summary.max,
        k3=summary.k3,
        signed_mean=summary.signed_mean,
        token_ess=summary.ess,
        sequence_ess=sequence_ess(delta, sequence),
        impossible_tokens=excluded,
        stable_context=None if stable is None else stable.tokens,
    )
    breaches += tuple(
        Breach(limit, value, gate)
        for limit, value, gate in (
            (Limit.MEAN, summary.mean, gates.mean),
            (Limit.P90, p90, gates.p90),
            (Limit.K3, summary.k3, gates.k3),
            (Limit.VETO, summary.max, gates.veto),
        )
        if value > gate
    )
    if breaches:
        by_length = "" if stable is None or stable.whole else f"; {stable.message}"
        return Parity(Outcome.FAIL, _joined(breaches) + by_length, evidence, breaches)
    message = f"mean |Δ| {summary.mean:.3g} over {summary.count} tokens, gate {gates.mean:.3g}"
    return Parity(Outcome.PASS, message, evidence)


def _not_sampled(excluded: int, absurd: int, tokens: int) -> tuple[Breach, ...]:
    """What no rounding does: tokens that the request excludes, and numbers that no sampled token can have."""
    # A token on the edge of a kept set may fall on either side by rounding.
    outside = (Breach(Limit.EXCLUDED, excluded),) if excluded > max(1, 1e-3 * tokens) else ()
    return (*outside, Breach(Limit.ABSURD, absurd)) if absurd else outside


def _joined(breaches: tuple[Breach, ...]) -> str:
    return "; ".join(map(str, breaches))
