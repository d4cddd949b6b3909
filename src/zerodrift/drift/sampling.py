"""Were the tokens drawn from the distribution that the request describes, each by a number of its own?"""

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from zerodrift.drift.draws import Draws, count_draws
from zerodrift.drift.gates import LEAST_TOKENS
from zerodrift.drift.power import power_of
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.evidence import GreedyEvidence, SamplingEvidence
from zerodrift.records.verdict import Outcome
from zerodrift.stats.martingale import SamplingFidelity, sampling_fidelity
from zerodrift.stats.placement import serial_dependence, uniformity

SAMPLING_ALPHA = 1e-6
"""Two-sided; 3,000 healthy runs are expected to raise 0.003 false alarms."""
SAMPLING_DOUBT = 1e-4
"""Below it chance is no good account either: one healthy run in 10,000 is asked to draw more."""
UNDECIDED = ": decide it with more samples"
TESTS = 5
"""How likely the tokens are, where they fall among likelier and rarer ones, where among all ids, and whether one draw
says something about the next, in either order. The least p-value counts, times five (Bonferroni)."""
WAYS = 2
"""These, and counts against what was due (`drift.draws`): each has half of the level."""
TIE = 2.5
"""Places up to so many times a token's own probability may be a tie's: with the likeliest token e^0.4 times as likely."""


class Sampling(NamedTuple):
    """What the tests say of the samples."""

    outcome: Outcome
    message: str
    evidence: SamplingEvidence | GreedyEvidence | None = None
    vacuous: bool = False
    """Nothing was there to test."""


def draws_depend(evidence: SamplingEvidence) -> bool:
    """One draw says something about the next: draws that do bunch up, and no other test says anything of its own then."""
    both = [each for each in (evidence.p_serial, evidence.p_serial_rank) if each is not None]
    return bool(both) and WAYS * TESTS * min(both) < SAMPLING_ALPHA


def fidelity(table: TokenTable) -> Sampling:
    """Five tests of sampled tokens, and bets on how often which of them came."""
    possible = np.isfinite(table.contracted)
    if int(possible.sum()) < LEAST_TOKENS:
        return _too_few(int(possible.sum()))
    drawable = table.rows(possible)
    draws = count_draws(drawable)
    test = sampling_fidelity(drawable.contracted, drawable.entropy, drawable.variance)
    power = power_of(draws, drawable, level=SAMPLING_ALPHA / WAYS, tests=TESTS)
    counted = SamplingEvidence(
        z=test.z, tokens=test.tokens, p_counts=draws.p_value, p=min(1.0, WAYS * draws.p_value), power=power
    )
    if test.vacuous:
        return _by_counts_alone(draws, counted, test)
    findings = _findings(table, drawable, test, possible)
    least, loudest = min(findings.values())
    p_value = min(1.0, WAYS * min(TESTS * least, draws.p_value))
    evidence = msgspec.structs.replace(
        counted,
        p=p_value,
        variance=test.variance,
        **{f"p_{name}": finding[0] for name, finding in findings.items()},
    )
    finding = loudest if TESTS * least < draws.p_value else draws.message
    finding = min(findings["serial"], findings["serial_rank"]).message if draws_depend(evidence) else finding
    return Sampling(*_judged(p_value, finding, test.z), evidence)


class _Finding(NamedTuple):
    p_value: float
    message: str


def _findings(
    table: TokenTable, drawable: TokenTable, test: SamplingFidelity, possible: NDArray[np.bool_]
) -> dict[str, _Finding]:
    """The five tests by name."""
    ranks, ids = uniformity(drawable.by_likelihood), uniformity(drawable.by_id)
    behind = _follows(table, possible)
    serial, ranked = (serial_dependence(points, behind) for points in (table.by_id, table.by_likelihood))
    side = "likelier" if test.z > 0 else "rarer"
    uneven_ranks = (
        "tokens of some rank come too often: their places among likelier and rarer ones are not even "
        f"(χ² = {ranks.chi_square:.0f})"
    )
    return {
        "surprise": _Finding(
            test.p_value,
            f"sampled tokens are {side} than the requested distribution allows (z = {test.z:+.1f})",
        ),
        "rank": _Finding(ranks.p_value, uneven_ranks),
        "id": _Finding(
            ids.p_value,
            f"some ids come too often: places among all ids are not even (χ² = {ids.chi_square:.0f})",
        ),
        "serial": _Finding(
            serial.p_value,
            f"one draw says something about the next (z = {serial.z:+.1f} over {serial.pairs} pairs)",
        ),
        "serial_rank": _Finding(
            ranked.p_value,
            f"how likely one draw was says something about the next (z = {ranked.z:+.1f} over {ranked.pairs} pairs)",
        ),
    }


def _by_counts_alone(draws: Draws, evidence: SamplingEvidence, test: SamplingFidelity) -> Sampling:
    """Where a sum of surprises is no Gaussian. Bets need none: what they win counts, and what they do not says little."""
    if WAYS * draws.p_value < SAMPLING_ALPHA:
        return Sampling(Outcome.FAIL, draws.message, evidence)
    message = "the sampled distributions are (nearly) points"
    if test.largest_step:
        message = "one token weighs more than all the others together: sample more of them"
    return Sampling(Outcome.INCONCLUSIVE, message, evidence, vacuous=True)


def _judged(p_value: float, finding: str, z: float) -> tuple[Outcome, str]:
    if p_value < SAMPLING_ALPHA:
        return Outcome.FAIL, finding
    if p_value < SAMPLING_DOUBT:
        often = f"which chance does once in {1 / p_value:,.0f} runs"
        return Outcome.INCONCLUSIVE, f"{finding}, {often}{UNDECIDED}"
    return Outcome.PASS, f"z = {z:+.2f}, p = {p_value:.2g}"


def greedy(table: TokenTable) -> Sampling:
    """Nothing is drawn at temperature 0: is every token the likeliest one, but for ties that rounding decides?"""
    tokens = len(table.token)
    if tokens < LEAST_TOKENS:
        return _too_few(tokens)
    # A token of rank 1 has at least the likeliest one's mass before it, and at most that and its own.
    others = int((table.by_likelihood > TIE * np.exp(table.contracted)).sum())
    message = f"{others} of {tokens} tokens are not the likeliest, though nothing was to be drawn"
    outcome = Outcome.FAIL if others > max(1, 1e-3 * tokens) else Outcome.PASS
    return Sampling(outcome, message, GreedyEvidence(tokens=tokens, not_likeliest=others))


def _too_few(tokens: int) -> Sampling:
    return Sampling(
        Outcome.INCONCLUSIVE, f"needs at least {LEAST_TOKENS} tokens; there are {tokens}", vacuous=True
    )


def _follows(table: TokenTable, possible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether a token stands right behind the one before it in the table, and both could be drawn."""
    behind = np.zeros(len(possible), dtype=np.bool_)
    behind[1:] = (np.diff(table.sequence) == 0) & (np.diff(table.index) == 1) & possible[1:] & possible[:-1]
    return behind
