"""What a line says would be seen is planted, exactly so large, and seen."""

from collections.abc import Callable

import numpy as np
import pytest
from tests.draws import STOP, Change, Source, distributions

from zerodrift.drift.power import _percent
from zerodrift.drift.sampling import fidelity
from zerodrift.records.evidence import Power, SamplingEvidence
from zerodrift.records.verdict import Outcome

TOKENS, RUNS = 2048, 20
PIECE = slice(256, 272)
HEAVY = 77


@pytest.fixture(scope="module")
def probs():
    return distributions(np.random.default_rng(0), TOKENS, stop=0.05)


@pytest.fixture(scope="module")
def lines(probs):
    return told(probs)


def told(probs: np.ndarray) -> dict[str, Power]:
    evidence = fidelity(Source(probs).draw(np.random.default_rng(1))).evidence
    assert isinstance(evidence, SamplingEvidence)
    return {line.name: line for line in evidence.power}


def with_mass(probs: np.ndarray, ids: slice | int, mass: float) -> np.ndarray:
    """So that these ids together have `mass` of what does not stop, in every row."""
    changed = probs.copy()
    chosen = np.zeros(probs.shape[1], dtype=np.bool_)
    chosen[ids] = True
    chosen[STOP] = False
    others = ~chosen
    others[STOP] = False
    left = 1 - changed[:, STOP : STOP + 1]
    changed[:, chosen] *= mass * left / changed[:, chosen].sum(axis=1, keepdims=True)
    changed[:, others] *= (1 - mass) * left / changed[:, others].sum(axis=1, keepdims=True)
    return changed


def heavy_in_some(probs: np.ndarray, mass: float) -> np.ndarray:
    """One id that has 0.4 of some distributions and nothing of others: `mass` of all, rounded up to whole rows."""
    changed = with_mass(probs, HEAVY, 1e-9)
    rows = np.arange(0, len(probs), int(0.4 / mass))
    changed[rows] = with_mass(probs[rows], HEAVY, 0.4)
    return changed


def never(ids: slice | int) -> Change:
    def change(probs: np.ndarray, _: np.ndarray) -> np.ndarray:
        probs[:, ids] = 0
        return probs

    return change


def heated(factor: float) -> Change:
    return lambda probs, _: probs ** (1 / factor)


def taken_first(share: float) -> Change:
    def change(probs: np.ndarray, index: np.ndarray) -> np.ndarray:
        first = np.flatnonzero(index == 0)
        # The stop token is another question.
        best = np.where(np.arange(probs.shape[1]) == STOP, 0, probs[first]).argmax(axis=1)
        stop = probs[first, STOP].copy()
        probs[first] *= 1 - share
        probs[first, STOP] = stop
        probs[first, best] += share * (1 - stop)
        return probs

    return change


def stop_times(factor: float) -> Change:
    def change(probs: np.ndarray, _: np.ndarray) -> np.ndarray:
        probs[:, STOP] *= factor
        return probs

    return change


def caught(probs: np.ndarray, change: Change | None, runs: int = RUNS) -> int:
    source = Source(probs)
    return sum(
        fidelity(source.draw(np.random.default_rng(100 + run), change)).outcome is Outcome.FAIL
        for run in range(runs)
    )


PLANTED: dict[str, Callable[[np.ndarray, float], tuple[np.ndarray, Change]]] = {
    "lower temperature": lambda probs, at: (probs, heated(at)),
    "higher temperature": lambda probs, at: (probs, heated(at)),
    "ids never drawn": lambda probs, at: (with_mass(probs, PIECE, 1.1 * at), never(PIECE)),
    "one id never drawn": lambda probs, at: (heavy_in_some(probs, at), never(HEAVY)),
    "rare tokens never drawn": lambda probs, at: (
        probs,
        lambda p, _: np.where(p < at * (1 - p[:, [STOP]]), 0, p),
    ),
    "first token taken": lambda probs, at: (probs, taken_first(at)),
    "stop token too rare": lambda probs, at: (probs, stop_times(at)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_would_be_seen_is_seen(probs, lines, name):
    seen_from = lines[name].seen_from
    assert seen_from is not None
    planted, change = PLANTED[name](probs, seen_from)
    assert caught(planted, change) >= 0.9 * RUNS


def test_a_tail_that_is_cut_off_is_seen(lines, probs):
    cut = lines["tail cut off"].seen_from
    assert cut is not None

    def truncated(used, _):
        order = np.argsort(used, axis=1)
        ranked = np.take_along_axis(used, order, axis=1)
        # Through a token where it must be: what lies within the rarest part goes.
        kept = np.clip(ranked.cumsum(axis=1) - cut, 0, ranked)
        result = np.zeros_like(used)
        np.put_along_axis(result, order, kept, axis=1)
        return result

    assert caught(probs, truncated) >= 0.9 * RUNS


@pytest.mark.parametrize("runs", [60, pytest.param(200, marks=pytest.mark.long)])
def test_nothing_planted_nothing_seen(probs, runs):
    assert caught(probs, None, runs) == 0


@pytest.mark.long
def test_half_of_it_is_mostly_overlooked(probs, lines):
    """The figures are not merely safe: half the deviation is not seen nine times in ten."""
    cooler, mass = lines["lower temperature"].seen_from, lines["ids never drawn"].seen_from
    assert cooler is not None
    assert mass is not None
    assert caught(probs, heated((1 + cooler) / 2)) <= 0.1 * RUNS
    assert caught(with_mass(probs, PIECE, mass / 2), never(PIECE)) <= 0.1 * RUNS


def test_more_draws_see_more():
    rng = np.random.default_rng(3)
    few, many = (told(distributions(rng, tokens, stop=0.05)) for tokens in (512, 4096))
    assert few["stop token too rare"].seen_from < 0.1 < many["stop token too rare"].seen_from
    for name in ("ids never drawn", "one id never drawn"):
        assert few[name].seen_from > 7 * many[name].seen_from
    assert few["lower temperature"].seen_from < many["lower temperature"].seen_from < 1


def test_where_stop_tokens_are_missing_the_line_says_so(probs):
    whole = Source(probs).draw(np.random.default_rng(2))
    without = whole.rows(~whole.masses.stopped)
    evidence = fidelity(type(without)(**{**vars(without), "ends_told": False})).evidence
    assert isinstance(evidence, SamplingEvidence)
    line = next(line for line in evidence.power if line.name == "stop token too rare")
    assert line.seen_from is None


@pytest.mark.parametrize(("share", "told"), [(0.011, "1.1 %"), (0.36, "36 %"), (0.9951, "100 %")])
def test_shares_are_told_without_exponents(share, told):
    assert _percent(share) == told
