"""The fast sums of a batch are those of the slow formulas in float64: to 12 digits, and counts exactly."""

import math

import numpy as np
import pytest

from zerodrift.drift import summary
from zerodrift.drift.summary import Workspace
from zerodrift.monitor import measure, strata
from zerodrift.monitor.gaps import Difference
from zerodrift.stats.kl import k3

RNG = np.random.default_rng(3)
COUNTS = np.array([1, 700, 15, 3000, 16, 17, 2, 256, 257, 1, 900])
"""Sequences that end at, before and behind the edges of positions, in blocks of at most 1,024 and a longer one."""
SIZE = int(COUNTS.sum())
TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(measure, "BLOCK", 1024)


def logprobs(delta: np.ndarray, dtype: type) -> Difference:
    later = np.minimum(-RNG.exponential(1.0, SIZE) + 0.3, -1e-6) - 25
    later[: SIZE // 2] += 25
    return Difference(np.minimum(later, 0).astype(dtype), (np.minimum(later, 0) - delta).astype(dtype))


BATCHES = {
    "bf16": logprobs(RNG.normal(0, 0.015, SIZE), np.float32),
    "fp32": logprobs(RNG.normal(0, 1e-6, SIZE), np.float64),
    "tails": logprobs(RNG.standard_t(1.5, SIZE).clip(-20, 20) * 0.3, np.float32),
    "far": logprobs(RNG.choice([-290.0, -3.0, 0.0, 3.0, 250.0], SIZE), np.float64),
    "equal": logprobs(np.zeros(SIZE), np.float32),
}


@pytest.fixture(params=["all", "some", "few"])
def chosen(request):
    share = {"all": None, "some": 0.5, "few": 0.0003}[request.param]
    if share is None:
        return None
    mask = np.random.default_rng(0).random(SIZE) < share
    assert mask.any()
    return mask


def given(name: str, chosen) -> tuple[Difference, np.ndarray, np.ndarray, np.ndarray]:
    """The batch, Δ in float64, and of each token its log p and its sequence."""
    later, earlier, _ = BATCHES[name]
    kept = np.ones(SIZE, bool) if chosen is None else chosen
    delta = (later - earlier).astype(np.float64)[kept]
    rows = np.repeat(np.arange(len(COUNTS)), COUNTS)[kept]
    return Difference(later, earlier, chosen), delta, later[kept], rows


@pytest.mark.parametrize("name", BATCHES)
def test_sums_of_a_gap_are_those_of_the_slow_formulas(name, chosen):
    difference, delta, _, rows = given(name, chosen)
    found = measure.measure(difference, COUNTS, 0.2).sums
    size = np.abs(delta)
    told = found.summary
    assert told.count == delta.size
    assert told.delta == pytest.approx(math.fsum(delta), abs=TOLERANCE * math.fsum(size))
    assert told.absolute == pytest.approx(math.fsum(size), rel=TOLERANCE)
    assert told.squared == pytest.approx(math.fsum(delta * delta), rel=TOLERANCE)
    assert told.k3_sum == pytest.approx(math.fsum(k3(delta)), rel=TOLERANCE)
    assert (told.top, told.max) == (delta.max(), size.max())
    ratio = np.exp(delta - delta.max())
    assert told.ratio == pytest.approx(math.fsum(ratio), rel=TOLERANCE)
    assert told.ratio_squared == pytest.approx(math.fsum(ratio * ratio), rel=TOLERANCE)
    bins = np.bincount(np.searchsorted(summary._EDGES, size[size > 0], side="right"), minlength=222)
    assert told.bins == (int((size == 0).sum()), *bins.tolist())
    assert found.below == np.count_nonzero(delta < np.log1p(-0.2))
    assert found.above == np.count_nonzero(delta > np.log1p(0.2))
    totals = np.array([math.fsum(delta[rows == row]) for row in np.unique(rows)])
    weights = np.exp(totals - totals.max())
    assert found.sequences.size == len(totals)
    assert found.sequences.total == pytest.approx(
        weights.sum(), rel=1e-9
    )  # e^Σ has the error of Σ, not of its digits


@pytest.mark.parametrize("name", BATCHES)
def test_strata_are_those_of_the_slow_formulas(name, chosen):
    difference, delta, target, rows = given(name, chosen)
    found = measure.measure(difference, COUNTS, 0.2, by_stratum=True).counted
    position = np.concatenate([np.arange(number) for number in COUNTS])
    position = position if chosen is None else position[chosen]
    part = np.searchsorted(strata.POSITIONS, position, side="right") - 1
    rarity = np.sum([target < edge for edge in strata.LOG_P], axis=0)
    clipped = np.clip(delta, -1, 1)
    slow = np.zeros((4, *found.tokens.shape))
    for row, value in enumerate((np.ones_like(delta), np.expm1(clipped), np.abs(clipped))):
        np.add.at(slow[row], (rows, part, rarity), value)
    np.testing.assert_array_equal(found.tokens, slow[0])
    np.testing.assert_allclose(found.size, slow[2], rtol=TOLERANCE)
    assert np.all(np.abs(found.ratio - slow[1]) <= TOLERANCE * (slow[2] + 1e-30) * 3)
    powers = clipped**2 / 2 + clipped**3 / 6 + clipped**4 / 24
    assert found.k3 == pytest.approx(math.fsum(powers), rel=TOLERANCE)
    assert found.k3_squares == pytest.approx(math.fsum(clipped**4) / 4, rel=TOLERANCE)


def test_a_ratio_that_nobody_draws_is_not_summed():
    later = np.array([-1.0, -1.0])
    assert measure.measure(Difference(later, later - [0, 301]), np.array([2]), 0.2) is None
    assert measure.largest(Difference(later, later - [0, 301]), np.array([2])) == 301


def test_lanes_change_where_a_token_is_added_and_not_what_is_added(monkeypatch):
    delta = RNG.normal(0, 0.1, 4000)
    target, counts = -RNG.exponential(1.0, 4000), np.array([4000])
    found = []
    for lanes in ((1,), (8, 1)):
        monkeypatch.setattr(strata, "_LANES", lanes)
        found.append(strata.count(Workspace(4000).block(delta), target, counts, None))
    one, eight = found
    np.testing.assert_array_equal(one.tokens, eight.tokens)
    np.testing.assert_allclose(one.size, eight.size, rtol=TOLERANCE)
    assert not np.array_equal(one.size, eight.size)  # another order of the same sum
