"""Rungs 3 and 4: are the reported numbers the trainer's, and were the tokens drawn from what they claim?"""

from collections.abc import Set
from typing import NamedTuple

import numpy as np

from zerodrift.audit.floor import Floor
from zerodrift.audit.measure import TokenTable
from zerodrift.audit.probes.result import Evidence, ProbeResult, answered, vacuous
from zerodrift.config.precision import Magnitude
from zerodrift.records.verdict import Outcome
from zerodrift.stats.arrays import LARGEST_LOG_RATIO
from zerodrift.stats.intervals import bootstrap_mean
from zerodrift.stats.martingale import sampling_fidelity
from zerodrift.stats.placement import serial_dependence, uniformity
from zerodrift.stats.ratios import sequence_ess, token_ess
from zerodrift.stats.summary import summarise

LEAST_TOKENS = 200
"""Fewer tokens than this decide nothing: a top-p fault needs about 400."""
FLOOR_MULTIPLES = {"float32": 5.0}
"""An engine has other kernels than the reference's variants: vLLM on CPU sits at 2 to 4 floors in fp32."""
FLOOR_MULTIPLE = 2.0
"""In any other precision, where rounding to it dwarfs the order of sums: healthy engines sit at 1.0 to 1.3 floors."""
SAMPLING_ALPHA = 1e-6
"""Two-sided; 3,000 healthy runs are expected to raise 0.003 false alarms."""
SAMPLING_DOUBT = 1e-4
"""Below it chance is no good account either: one healthy run in 10,000 is asked to draw more."""
TIE = 2.5
"""Places up to so many times a token's own probability may be a tie's: with the likeliest token e^0.4 times as likely."""
SERIAL = "one draw says something about the next"
VETO_NATS = 2.0
"""No trained dense model in bf16 was ever seen above 0.5 on a healthy token. Where the floor is higher than theirs, as
on built-in models, whose logits are large, so is the veto."""
VETO_PER_P90 = 20.0


class Gates(NamedTuple):
    """The limits in force: the profile's, or a multiple of the measured floor where that is higher."""

    mean: float
    p90: float
    k3: float
    veto: float


def gates_for(gate: Magnitude, floor: Floor, own: Set[str] = frozenset()) -> Gates:
    """Relative to the floor and to the precision profile, never one absolute number; `own` are taken as they are."""
    multiple = FLOOR_MULTIPLES.get(floor.precision, FLOOR_MULTIPLE)
    mean = gate.mean_abs if "mean_abs" in own else max(gate.mean_abs, multiple * floor.mean)
    p90 = gate.p90_abs if "p90_abs" in own else max(gate.p90_abs, multiple * floor.p90)
    return Gates(mean, p90, gate.k3, max(VETO_NATS, VETO_PER_P90 * multiple * floor.p90))


def parity(table: TokenTable, gates: Gates, rng: np.random.Generator) -> ProbeResult:
    """Mean and p90 of |Δ| decide, k3 is capped, the maximum is a veto."""
    name = "parity"
    possible, delta = np.isfinite(table.contracted), table.delta
    excluded = int((~possible).sum())
    absurd = possible & (delta > LARGEST_LOG_RATIO)
    compared = possible & ~absurd
    delta, sequence = delta[compared], table.sequence[compared]
    broken = _not_sampled(excluded, int(absurd.sum()), len(possible))
    if len(delta) < LEAST_TOKENS or len(np.unique(sequence)) < 2:
        if broken and len(possible) >= LEAST_TOKENS:
            few: Evidence = {"tokens": len(delta), "impossible_tokens": excluded}
            return answered(name, Outcome.FAIL, "; ".join(broken), few, required=True)
        says = f"{len(delta)} tokens of {len(np.unique(sequence))} sequences; {LEAST_TOKENS} of 2 are needed"
        return vacuous(name, says, required=True)
    summary = summarise(delta)
    interval = bootstrap_mean(np.abs(delta), sequence, rng)
    evidence = {
        "tokens": summary.count,
        "mean": summary.mean,
        "mean_low": interval.low,
        "mean_high": interval.high,
        "p90": summary.p90,
        "p99": summary.p99,
        "max": summary.max,
        "k3": summary.k3,
        "signed_mean": summary.signed_mean,
        "token_ess": token_ess(delta),
        "sequence_ess": sequence_ess(delta, sequence),
        "impossible_tokens": excluded,
    }
    broken += [
        f"{label} {value:.3g} > {limit:.3g}"
        for label, value, limit in (
            ("mean |Δ|", summary.mean, gates.mean),
            ("p90 |Δ|", summary.p90, gates.p90),
            ("k3", summary.k3, gates.k3),
            ("max |Δ|", summary.max, gates.veto),
        )
        if value > limit
    ]
    status = Outcome.FAIL if broken else Outcome.PASS
    says = (
        "; ".join(broken) or f"mean |Δ| {summary.mean:.3g} over {summary.count} tokens, gate {gates.mean:.3g}"
    )
    return answered(name, status, says, evidence, required=True)


def _not_sampled(excluded: int, absurd: int, tokens: int) -> list[str]:
    """What no rounding does: tokens that the request excludes, and numbers that no sampled token can have."""
    broken = []
    # A token on the edge of a kept set may fall on either side by rounding.
    if excluded > max(1, 1e-3 * tokens):
        broken.append(f"{excluded} sampled tokens are excluded by the requested parameters")
    if absurd:
        broken.append(f"{absurd} reported logprobs lie more than {LARGEST_LOG_RATIO:.0f} nats too low")
    return broken


def fidelity(table: TokenTable) -> ProbeResult:
    """Were the tokens drawn from the distribution that the request describes, each by a number of its own?

    Four tests: how likely the tokens are, where they fall among likelier and rarer ones, where among all ids, and
    whether one draw says something about the next. The least p-value counts, times four.
    """
    name = "sampling"
    possible = np.isfinite(table.contracted)
    if int(possible.sum()) < LEAST_TOKENS:
        return vacuous(name, f"{int(possible.sum())} tokens; {LEAST_TOKENS} are needed", required=True)
    test = sampling_fidelity(table.contracted[possible], table.entropy[possible], table.variance[possible])
    if test.vacuous:
        says = "the sampled distributions are (nearly) points"
        if test.largest_step:
            says = "one token weighs more than all the others together: sample more of them"
        return vacuous(name, says, {"z": test.z, "tokens": test.tokens}, required=True)
    ranks, ids = uniformity(table.by_likelihood[possible]), uniformity(table.by_id[possible])
    serial = serial_dependence(table.by_id, _follows(table, possible))
    side = "likelier" if test.z > 0 else "rarer"
    findings = {
        f"sampled tokens are {side} than the requested distribution allows (z = {test.z:+.1f})": test.p_value,
        "tokens of some rank come too often: their places among likelier and rarer ones are not even "
        f"(χ² = {ranks.chi_square:.0f})": ranks.p_value,
        f"some ids come too often: places among all ids are not even (χ² = {ids.chi_square:.0f})": ids.p_value,
        f"{SERIAL} (z = {serial.z:+.1f} over {serial.pairs} pairs)": serial.p_value,
    }
    p_value = min(1.0, len(findings) * min(findings.values()))
    # Draws that depend on each other bunch up: then no other test says anything of its own.
    dependent = len(findings) * serial.p_value < SAMPLING_ALPHA
    says = list(findings)[-1] if dependent else min(findings, key=lambda finding: findings[finding])
    evidence: Evidence = {
        "z": test.z,
        "p": p_value,
        "p_surprise": test.p_value,
        "p_rank": ranks.p_value,
        "p_id": ids.p_value,
        "p_serial": serial.p_value,
        "tokens": test.tokens,
        "variance": test.variance,
    }
    if p_value < SAMPLING_ALPHA:
        return answered(name, Outcome.FAIL, says, evidence, required=True)
    if p_value < SAMPLING_DOUBT:
        doubt = f"{says}, which chance does once in {1 / p_value:,.0f} runs: decide it with more samples (--trials)"
        return answered(name, Outcome.INCONCLUSIVE, doubt, evidence, required=True)
    return answered(name, Outcome.PASS, f"z = {test.z:+.2f}, p = {p_value:.2g}", evidence, required=True)


def greedy(table: TokenTable) -> ProbeResult:
    """Nothing is drawn at temperature 0: is every token the likeliest one, but for ties that rounding decides?"""
    name = "sampling"
    if len(table.token) < LEAST_TOKENS:
        return vacuous(name, f"{len(table.token)} tokens; {LEAST_TOKENS} are needed", required=True)
    # A token of rank 1 has at least the likeliest one's mass before it, and at most that and its own.
    others = int((table.by_likelihood > TIE * np.exp(table.contracted)).sum())
    evidence: Evidence = {"tokens": len(table.token), "not_likeliest": others}
    says = f"{others} of {len(table.token)} tokens are not the likeliest, though nothing was to be drawn"
    status = Outcome.FAIL if others > max(1, 1e-3 * len(table.token)) else Outcome.PASS
    return answered(name, status, says, evidence, required=True)


def _follows(table: TokenTable, possible: np.ndarray) -> np.ndarray:
    """Whether a token stands right behind the one before it in the table, and both could be drawn."""
    behind = np.zeros(len(possible), dtype=np.bool_)
    behind[1:] = (np.diff(table.sequence) == 0) & (np.diff(table.index) == 1) & possible[1:] & possible[:-1]
    return behind


def sampling_cause(result: ProbeResult) -> str:
    """What a failed test of the samples proves by itself, where no account of the sampler explains it."""
    return "semantic/seed" if result.record.says.startswith(SERIAL) else "semantic/sampling-bias"
