import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from zerodrift.drift.gates import LEAST_TOKENS
from zerodrift.drift.sampling import draws_depend, fidelity, greedy
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.evidence import GreedyEvidence, SamplingEvidence
from zerodrift.records.verdict import Outcome

Table = Callable[..., TokenTable]
SEQUENCES = 20


@pytest.mark.parametrize(
    ("others", "outcome"), [(0, Outcome.PASS), (1, Outcome.PASS), (2, Outcome.FAIL), (400, Outcome.FAIL)]
)
def test_greedy_tokens_are_the_likeliest(table, others, outcome):
    """The likeliest has its own mass before its end, a tie twice that, and any other token more."""
    places = np.full(400, 0.1)
    places[200:] = 0.39  # ties
    places[:others] = 0.6
    seen = table(np.zeros(400), np.full(400, np.log(0.2)))
    found = greedy(dataclasses.replace(seen, by_likelihood=places))
    assert (found.outcome, found.evidence) == (outcome, GreedyEvidence(tokens=400, not_likeliest=others))


@pytest.mark.parametrize("test", [greedy, fidelity])
def test_few_tokens_decide_nothing(table, test):
    found = test(table(np.zeros(LEAST_TOKENS - 1)))
    assert (found.outcome, found.vacuous) == (Outcome.INCONCLUSIVE, True)


def drawn(table: Table, z: float, tokens: int = 400) -> TokenTable:
    """Tokens of entropy 1 and variance 1 whose sum is `z` standard deviations from where it should be."""
    return table(np.zeros(tokens), np.full(tokens, -1.0 + z / np.sqrt(tokens)))


@pytest.mark.parametrize(
    ("z", "outcome"),
    [
        (0.0, Outcome.PASS),
        (4.0, Outcome.PASS),
        (4.5, Outcome.INCONCLUSIVE),
        (6.0, Outcome.FAIL),
        (-6.0, Outcome.FAIL),
    ],
)
def test_samples_likelier_or_rarer_than_they_may_be(table, z, outcome):
    found = fidelity(drawn(table, z))
    assert (found.outcome, found.vacuous) == (outcome, False)
    assert isinstance(found.evidence, SamplingEvidence)
    assert found.evidence.z == pytest.approx(z)


def frozen(points: np.ndarray) -> np.ndarray:
    """One number for all draws of a sequence."""
    return np.repeat(points[:: len(points) // SEQUENCES], len(points) // SEQUENCES)[: len(points)]


@pytest.mark.parametrize(
    ("column", "change", "loudest", "depend"),
    [
        ("by_likelihood", lambda points: points**2, "p_rank", False),
        ("by_id", lambda points: points / 2, "p_id", False),
        # Draws that repeat each other bunch up in every test.
        ("by_id", frozen, "p_serial", True),
    ],
)
def test_draws_that_are_as_likely_as_they_should_be_and_still_wrong(table, column, change, loudest, depend):
    seen = drawn(table, 0.0, 4000)
    assert fidelity(seen).outcome is Outcome.PASS
    found = fidelity(dataclasses.replace(seen, **{column: change(getattr(seen, column))}))
    assert found.outcome is Outcome.FAIL
    assert isinstance(found.evidence, SamplingEvidence)
    assert getattr(found.evidence, loudest) < 1e-6
    assert draws_depend(found.evidence) is depend


def test_a_token_that_could_not_be_drawn_is_nobodys_neighbour(table):
    """Its place means nothing."""
    seen = drawn(table, 0.0, 4000)
    seen.contracted[::2] = -np.inf
    found = fidelity(dataclasses.replace(seen, by_id=frozen(seen.by_id)))
    assert isinstance(found.evidence, SamplingEvidence)
    assert found.evidence.p_serial == 1.0


def test_points_and_one_wild_token_decide_nothing(table):
    """A distribution of one token tests nothing; one token that weighs more than all the others may be chance."""
    certain = table(np.zeros(400), np.zeros(400))
    certain.entropy[:] = certain.variance[:] = 0.0
    wild = np.full(400, -1.0)
    wild[7] = -30.0
    for seen in (certain, table(np.zeros(400), wild)):
        found = fidelity(seen)
        assert (found.outcome, found.vacuous) == (Outcome.INCONCLUSIVE, True)
        assert isinstance(found.evidence, SamplingEvidence)
        assert found.evidence.tokens == 400


def test_tokens_that_are_all_wild_are_no_chance(table):
    """Drawn at random from the whole vocabulary: no single step is small, and that must not hide the sum of them."""
    assert fidelity(table(np.zeros(400), np.full(400, -17.0))).outcome is Outcome.FAIL
