import numpy as np
import pytest

from zerodrift.drift.gates import LEAST_TOKENS, Gates
from zerodrift.drift.parity import Limit, compare
from zerodrift.records.verdict import Outcome

GATES = Gates(mean=1e-3, p90=3e-3, k3=1e-4, veto=1.0)


@pytest.fixture
def judge(table):
    return lambda delta, *rest: compare(table(delta, *rest), GATES, np.random.default_rng(0))


def spiked(size: float, count: int, tokens: int = 400) -> np.ndarray:
    delta = np.zeros(tokens)
    delta[:: tokens // count][:count] = size
    return delta


@pytest.mark.parametrize(
    ("delta", "broken"),
    [
        (np.full(400, 9e-4), []),
        (np.full(400, -9e-4), []),
        (np.full(400, 1.5e-3), [Limit.MEAN]),
        # One token in eight off by 0.004: the mean stays at 0.0005.
        (spiked(4e-3, 50), [Limit.P90]),
        # One token off by 0.3: mean 0.00075, k3 = (e^0.3 - 1.3) / 400 = 1.2e-4.
        (spiked(0.25, 1), []),
        (spiked(0.3, 1), [Limit.K3]),
        (spiked(-1.5, 1, 4000), [Limit.K3, Limit.VETO]),
        # e⁻⁵⁰⁰⁰ is the probability of nothing that was ever sampled: exp(Δ) would not even be a number.
        (spiked(5000.0, 3), [Limit.ABSURD]),
        (spiked(5000.0, 400), [Limit.ABSURD]),
    ],
)
def test_each_gate_is_seen_failing(judge, delta, broken):
    found = judge(delta)
    assert [breach.limit for breach in found.breaches] == broken
    assert found.outcome is (Outcome.FAIL if broken else Outcome.PASS)
    assert found.evidence is not None
    assert all(np.isfinite(float(value)) for value in found.evidence.as_record().values())


def test_the_evidence_is_that_of_numpy(judge):
    delta = np.random.default_rng(0).normal(0, 1e-3, 500)
    evidence = judge(delta).evidence
    assert evidence is not None
    known = evidence.as_record()
    assert known["mean_low"] < known["mean"] < known["mean_high"]
    for name, value in {
        "tokens": 500,
        "mean": np.abs(delta).mean(),
        "p90": np.quantile(np.abs(delta), 0.9),
        "max": np.abs(delta).max(),
        "k3": np.mean(np.expm1(delta) - delta),
        "signed_mean": delta.mean(),
        "impossible_tokens": 0,
    }.items():
        assert known[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 1), (1, 1), (LEAST_TOKENS - 1, 20), (400, 1)])
def test_few_tokens_or_one_sequence_decide_nothing(judge, tokens, sequences):
    """Tokens of one sequence depend on each other, and no interval says how far."""
    found = judge(np.full(tokens, 1.0), None, sequences)
    assert (found.outcome, found.evidence, found.breaches) == (Outcome.INCONCLUSIVE, None, ())


@pytest.mark.parametrize(("count", "broken"), [(0, []), (1, []), (2, [2]), (300, [300]), (400, [400])])
def test_tokens_that_the_request_excludes(judge, count, broken):
    """One may fall off the edge of a kept set by rounding. That few are left to compare is no excuse."""
    contracted = np.full(400, -1.0)
    contracted[:count] = -np.inf
    found = judge(np.zeros(400), contracted)
    assert found.outcome is (Outcome.FAIL if broken else Outcome.PASS)
    assert [breach.value for breach in found.breaches if breach.limit is Limit.EXCLUDED] == broken
    assert found.evidence is not None
    assert found.evidence.impossible_tokens == count
