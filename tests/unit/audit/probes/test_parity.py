import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from zerodrift.audit.floor import Floor
from zerodrift.audit.measure import TokenTable
from zerodrift.audit.probes.parity import (
    LEAST_TOKENS,
    Gates,
    fidelity,
    gates_for,
    greedy,
    parity,
    sampling_cause,
)
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.config.precision import Magnitude
from zerodrift.records.verdict import Outcome

GATES = Gates(mean=1e-3, p90=3e-3, k3=1e-4, veto=1.0)
SEQUENCES = 20
RNG = np.random.default_rng(0)


def table(delta: np.ndarray, contracted: np.ndarray | None = None, sequences: int = SEQUENCES) -> TokenTable:
    """Tokens that differ from what was asked for by exactly `delta`."""
    size = len(delta)
    wanted = np.full(size, -1.0) if contracted is None else contracted
    index = np.arange(size)
    return TokenTable(
        sequence=index * sequences // size,
        index=index,
        position=index,
        token=index,
        reported=np.where(np.isfinite(wanted), wanted, -1.0) - delta,
        contracted=wanted,
        raw=wanted,
        entropy=np.full(size, 1.0),
        variance=np.full(size, 1.0),
        by_likelihood=np.random.default_rng(1).random(size),
        by_id=np.random.default_rng(2).random(size),
        sigma=np.full(size, 1e-6),
    )


def judge(delta: np.ndarray, **options: object) -> ProbeResult:
    return parity(table(delta, **options), GATES, np.random.default_rng(0))  # type: ignore[arg-type]


def spiked(size: float, count: int, tokens: int = 400) -> np.ndarray:
    delta = np.zeros(tokens)
    delta[:: tokens // count][:count] = size
    return delta


@pytest.mark.parametrize(
    ("delta", "broken"),
    [
        (np.full(400, 9e-4), []),
        (np.full(400, -9e-4), []),
        (np.full(400, 1.5e-3), ["mean"]),
        # One token in eight off by 0.004: the mean stays at 0.0005.
        (spiked(4e-3, 50), ["p90"]),
        # One token off by 0.3: mean 0.00075, k3 = (e^0.3 - 1.3) / 400 = 1.2e-4.
        (spiked(0.25, 1), []),
        (spiked(0.3, 1), ["k3"]),
        (spiked(-1.5, 1, 4000), ["k3", "max"]),
    ],
)
def test_each_gate_is_seen_failing(delta: np.ndarray, broken: list[str]) -> None:
    result = judge(delta)
    assert result.record.required
    assert result.record.status is (Outcome.FAIL if broken else Outcome.PASS)
    assert [word for word in ("mean |", "p90 |", "k3", "max |") if word in result.record.says and broken] == [
        f"{word} |" if word != "k3" else word for word in broken
    ]


def test_the_evidence_is_that_of_numpy() -> None:
    delta = RNG.normal(0, 1e-3, 500)
    evidence = judge(delta).record.evidence
    assert evidence["tokens"] == 500
    assert evidence["mean"] == pytest.approx(np.abs(delta).mean())
    assert evidence["p90"] == pytest.approx(np.quantile(np.abs(delta), 0.9))
    assert evidence["max"] == pytest.approx(np.abs(delta).max())
    assert evidence["k3"] == pytest.approx((np.exp(delta) - 1 - delta).mean(), rel=1e-4)
    assert evidence["signed_mean"] == pytest.approx(delta.mean())
    assert evidence["mean_low"] < evidence["mean"] < evidence["mean_high"]
    assert evidence["impossible_tokens"] == 0


@pytest.mark.parametrize("tokens", [0, 1, LEAST_TOKENS - 1])
def test_few_tokens_decide_nothing(tokens: int) -> None:
    result = judge(np.zeros(tokens), sequences=max(1, min(tokens, SEQUENCES)))
    assert (result.record.status, result.record.vacuous, result.record.required) == (
        Outcome.INCONCLUSIVE,
        True,
        True,
    )
    assert f"{tokens} tokens" in result.record.says
    assert fidelity(table(np.zeros(tokens))).record.vacuous


def test_one_sequence_decides_nothing() -> None:
    """Its tokens depend on each other, and no interval says how far."""
    result = judge(np.full(400, 1.0), sequences=1)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert "sequence" in result.record.says


@pytest.mark.parametrize(("count", "status"), [(0, Outcome.PASS), (1, Outcome.PASS), (2, Outcome.FAIL)])
def test_tokens_that_the_request_excludes(count: int, status: Outcome) -> None:
    contracted = np.full(400, -1.0)
    contracted[:count] = -np.inf
    result = judge(np.zeros(400), contracted=contracted)
    assert result.record.status is status
    assert result.record.evidence["impossible_tokens"] == count
    if status is Outcome.FAIL:
        assert "2 sampled tokens are excluded by the requested parameters" in result.record.says


@pytest.mark.parametrize("possible", [0, 100])
def test_an_engine_that_samples_little_but_excluded_tokens_fails(possible: int) -> None:
    """Top-k 1 was requested and is ignored: what is left to compare is little, and that is no excuse."""
    contracted = np.full(400, -np.inf)
    contracted[:possible] = 0.0
    result = judge(np.zeros(400), contracted=contracted)
    assert result.record.status is Outcome.FAIL
    assert f"{400 - possible} sampled tokens are excluded" in result.record.says
    assert result.record.evidence["impossible_tokens"] == 400 - possible


@pytest.mark.parametrize(("delta", "count"), [(5000.0, 400), (5000.0, 3)])
def test_numbers_that_no_sampler_can_mean_fail(delta: float, count: int) -> None:
    """e⁻⁵⁰⁰⁰ is the probability of nothing that was ever sampled: exp(Δ) would not even be a number."""
    result = judge(spiked(delta, count))
    assert result.record.status is Outcome.FAIL
    assert all(np.isfinite(float(value)) for value in result.record.evidence.values())
    assert f"{count} " in result.record.says


def test_gates_are_the_profile_or_a_multiple_of_the_floor() -> None:
    profile = Magnitude(mean_abs=1e-5, p90_abs=2.5e-5, k3=1e-6)
    low = Floor("float32", 8, 10, 1e-7, 2e-7, (0.0,), (1e-7,))
    assert gates_for(profile, low) == Gates(1e-5, 2.5e-5, 1e-6, 2.0)
    high = Floor("bfloat16", 8, 10, 0.01, 0.03, (0.0,), (0.01,))
    assert gates_for(profile, high) == Gates(0.02, 0.06, 1e-6, 2.0)
    higher = Floor("bfloat16", 8, 10, 0.03, 0.1, (0.0,), (0.01,))
    assert gates_for(profile, higher) == pytest.approx(Gates(0.06, 0.2, 1e-6, 4.0))
    single = Floor("float32", 8, 10, 1e-5, 2e-5, (0.0,), (1e-7,))
    assert gates_for(profile, single) == pytest.approx(Gates(5e-5, 1e-4, 1e-6, 2.0))


def test_a_gate_of_ones_own_is_not_moved_by_the_floor() -> None:
    own = Magnitude(mean_abs=1e-3, p90_abs=2e-3, k3=1e-6)
    floor = Floor("bfloat16", 8, 10, 0.01, 0.03, (0.0,), (0.01,))
    assert gates_for(own, floor, {"mean_abs"})[:2] == (1e-3, 0.06)
    assert gates_for(own, floor, {"p90_abs"})[:2] == (0.02, 2e-3)


# --- greedy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "status"), [(0, Outcome.PASS), (1, Outcome.PASS), (2, Outcome.FAIL), (400, Outcome.FAIL)]
)
def test_greedy_tokens_are_the_likeliest(others: int, status: Outcome) -> None:
    """The likeliest has its own mass before its end, a tie twice that, and any other token more."""
    seen = table(np.zeros(400), np.full(400, np.log(0.2)))
    places = np.full(400, 0.1)
    places[200:] = 0.39  # ties
    places[:others] = 0.6
    result = greedy(dataclasses.replace(seen, by_likelihood=places))
    assert (result.record.status, result.record.evidence["not_likeliest"]) == (status, others)


def test_a_few_greedy_tokens_decide_nothing() -> None:
    assert greedy(table(np.zeros(LEAST_TOKENS - 1))).record.vacuous


# --- sampling ---------------------------------------------------------------------------------------------------


def drawn(z: float, tokens: int = 400) -> TokenTable:
    """Tokens of entropy 1 and variance 1 whose sum is `z` standard deviations from where it should be."""
    return table(np.zeros(tokens), np.full(tokens, -1.0 + z / np.sqrt(tokens)))


@pytest.mark.parametrize(
    ("z", "status", "words"),
    [
        (0.0, Outcome.PASS, "z = +0.00"),
        (4.0, Outcome.PASS, "z = +4.00"),
        (4.5, Outcome.INCONCLUSIVE, "(z = +4.5), which chance does once in 36,"),
        (6.0, Outcome.FAIL, "likelier than the requested distribution allows (z = +6.0)"),
        (-6.0, Outcome.FAIL, "rarer than the requested distribution allows (z = -6.0)"),
    ],
)
def test_samples_likelier_or_rarer_than_they_may_be(z: float, status: Outcome, words: str) -> None:
    result = fidelity(drawn(z))
    assert result.record.status is status
    assert words in result.record.says
    assert result.record.evidence["z"] == pytest.approx(z)
    assert result.record.required


def frozen(points: np.ndarray) -> np.ndarray:
    """One number for all draws of a sequence."""
    return np.repeat(points[:: len(points) // SEQUENCES], len(points) // SEQUENCES)[: len(points)]


@pytest.mark.parametrize(
    ("column", "change", "words", "cause"),
    [
        (
            "by_likelihood",
            lambda points: points**2,
            "tokens of some rank come too often",
            "semantic/sampling-bias",
        ),
        ("by_id", lambda points: points / 2, "some ids come too often", "semantic/sampling-bias"),
        ("by_id", frozen, "one draw says something about the next", "semantic/seed"),
    ],
)
def test_draws_that_are_as_likely_as_they_should_be_and_still_wrong(
    column: str, change: Callable[[np.ndarray], np.ndarray], words: str, cause: str
) -> None:
    seen = drawn(0.0, 4000)
    assert fidelity(seen).record.status is Outcome.PASS
    result = fidelity(dataclasses.replace(seen, **{column: change(getattr(seen, column))}))
    assert result.record.status is Outcome.FAIL
    assert words in result.record.says
    assert sampling_cause(result) == cause


def test_a_token_that_could_not_be_drawn_is_nobodys_neighbour() -> None:
    """Its place means nothing."""
    seen = drawn(0.0, 4000)
    seen.contracted[::2] = -np.inf
    result = fidelity(dataclasses.replace(seen, by_id=frozen(seen.by_id)))
    assert result.record.evidence["p_serial"] == 1.0


def test_a_distribution_of_one_token_tests_nothing() -> None:
    certain = table(np.zeros(400), np.zeros(400))
    certain.entropy[:] = certain.variance[:] = 0.0
    result = fidelity(certain)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert result.record.evidence["tokens"] == 400


def test_one_wild_token_decides_nothing() -> None:
    """Every step but one is where it should be: that one may be chance, and weighs more than all the others."""
    contracted = np.full(400, -1.0)
    contracted[7] = -30.0
    result = fidelity(table(np.zeros(400), contracted))
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert "one token" in result.record.says


def test_tokens_that_are_all_wild_are_no_chance() -> None:
    """Drawn at random from the whole vocabulary: no single step is small, and that must not hide the sum of them."""
    result = fidelity(table(np.zeros(400), np.full(400, -17.0)))
    assert result.record.status is Outcome.FAIL
    assert "rarer" in result.record.says
