"""Samplers that are wrong in one way each, beside one that is not."""

import dataclasses

import numpy as np
import pytest
from tests.draws import STOP, Change, Source, distributions

from zerodrift.drift.draws import KINDS, count_draws
from zerodrift.drift.sampling import fidelity
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.evidence import SamplingEvidence
from zerodrift.records.verdict import Outcome

TOKENS = 2048
"""Those of an audit without options."""


@pytest.fixture(scope="module")
def source():
    return Source(distributions(np.random.default_rng(0), TOKENS, stop=0.03))


def never(ids: slice) -> Change:
    def change(probs: np.ndarray, _: np.ndarray) -> np.ndarray:
        probs[:, ids] = 0
        return probs

    return change


def none_under(limit: float) -> Change:
    return lambda probs, _: np.where(probs < limit, 0, probs)


def one_id_never(probs: np.ndarray, _: np.ndarray) -> np.ndarray:
    total = probs.sum(axis=0)
    total[STOP] = 0
    probs[:, total.argmax()] = 0
    return probs


def first_is_the_likeliest(probs: np.ndarray, index: np.ndarray) -> np.ndarray:
    first = np.flatnonzero(index == 0)
    best = probs[first].argmax(axis=1)
    probs[first] = 0
    probs[first, best] = 1
    return probs


def no_stop(probs: np.ndarray, _: np.ndarray) -> np.ndarray:
    probs[:, STOP] = 0
    return probs


WRONG: dict[str, tuple[Change, str]] = {
    "a thirteenth of the ids": (never(slice(470, 509)), "ids"),
    "the last sixteen ids": (never(slice(496, 512)), "ids"),
    "one heavy id": (one_id_never, "one id"),
    "none under 0.007": (none_under(0.007), "rarity"),
    "none under 0.0008": (none_under(0.0008), "rarity"),
    "first token": (first_is_the_likeliest, "likeliest"),
    "no stop": (no_stop, "stop"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_drawn_too_seldom_or_too_often_is_seen(source, name):
    change, kind = WRONG[name]
    found = fidelity(source.draw(np.random.default_rng(1), change))
    assert found.outcome is Outcome.FAIL
    assert isinstance(found.evidence, SamplingEvidence)
    assert found.evidence.p_counts is not None
    assert found.evidence.p_counts < 5e-7
    draws = count_draws(source.draw(np.random.default_rng(1), change))
    assert max(draws.kinds, key=lambda each: each.log_e).name == kind


@pytest.mark.parametrize("again", [lambda index: index % 2 == 1, lambda index: index % 3 > 0])
def test_noise_that_is_used_again_is_seen_where_no_place_shows_it(source, again):
    """Arrival times of the token before: what won there wins again oftener than it is due, wherever among ids it is."""
    found = fidelity(source.raced(np.random.default_rng(1), again))
    assert found.outcome is Outcome.FAIL
    draws = count_draws(source.raced(np.random.default_rng(1), again))
    assert max(draws.kinds, key=lambda each: each.log_e).name == "again"
    assert fidelity(source.raced(np.random.default_rng(1), lambda _: False)).outcome is Outcome.PASS


def test_a_place_that_is_used_again_is_seen_by_its_likelihood(source):
    """One number for two draws, with likelier tokens first: as samplers do that sort for top-p."""
    rng = np.random.default_rng(4)
    points = rng.random(len(source.probs))
    points[1::2] = points[::2]
    order = np.argsort(-source.probs, axis=1)
    bounds = np.take_along_axis(source.probs, order, axis=1).cumsum(axis=1)
    ranks = (bounds > points[:, None] * bounds[:, -1:]).argmax(axis=1)
    picks = order[np.arange(len(points)), ranks]
    found = fidelity(source.table(picks, rng))
    assert found.outcome is Outcome.FAIL
    assert isinstance(found.evidence, SamplingEvidence)
    assert found.evidence.p_serial_rank is not None
    assert found.evidence.p_serial_rank < 1e-8


def test_honest_draws_win_nothing():
    """The mean of E is one at most, and 1e4 would be a doubt."""
    rng = np.random.default_rng(5)
    few = Source(distributions(rng, 512))
    log_es = [count_draws(few.draw(rng)).log_e for _ in range(300)]
    assert max(log_es) < np.log(1000)
    assert np.exp(log_es).mean() < 1.5


def test_every_kind_is_named_once(source):
    draws = count_draws(source.draw(np.random.default_rng(1)))
    assert tuple(kind.name for kind in draws.kinds) == KINDS


def test_stop_tokens_that_were_left_out_are_no_evidence(source):
    """A recording without them, from an honest engine: 61 were due, and what is left was drawn as it should be."""
    whole = source.draw(np.random.default_rng(2))
    without: TokenTable = dataclasses.replace(whole.rows(~whole.masses.stopped), ends_told=False)
    assert count_draws(without).log_e < np.log(100)
    assert count_draws(dataclasses.replace(without, ends_told=True)).log_e > np.log(1e6)


def test_counts_decide_where_a_sum_of_surprises_is_no_gaussian():
    """Nearly certain tokens, of which a third is never drawn as it should be: every stop token."""
    certain = np.full((TOKENS, 512), 1e-12)
    certain[:, 7], certain[:, STOP] = 0.98, 0.02
    few = Source(certain)
    assert fidelity(few.draw(np.random.default_rng(3))).outcome is not Outcome.FAIL
    assert fidelity(few.draw(np.random.default_rng(3), no_stop)).outcome is Outcome.FAIL
