import numpy as np
import pytest

from zerodrift.core.errors import InvalidValue, NonFinite
from zerodrift.stats import intervals
from zerodrift.stats.intervals import bootstrap_mean, bootstrap_ratio


def test_bootstrap_is_that_of_whole_sequences_put_back_token_by_token():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 9, size=12)
    ids, values = np.repeat(np.arange(12), lengths), generator.normal(size=lengths.sum())
    found = bootstrap_mean(values, ids, np.random.default_rng(7), confidence=0.9, resamples=300)
    picks = np.random.default_rng(7).integers(12, size=(300, 12))
    means = [np.concatenate([values[ids == pick] for pick in row]).mean() for row in picks]
    assert found.estimate == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, (0.05, 0.95))))
    assert found.confidence == 0.9


def test_many_sequences_are_resampled_in_blocks(monkeypatch):
    values, ids = np.random.default_rng(1).normal(size=60), np.repeat(np.arange(20), 3)
    monkeypatch.setattr(intervals, "_CELLS_PER_BLOCK", 7 * 20)
    found = bootstrap_mean(values, ids, np.random.default_rng(2), resamples=2000)
    expected = values.reshape(20, 3).mean(axis=1).std() / np.sqrt(20)
    assert found.high - found.low == pytest.approx(2 * 1.96 * expected, rel=0.1)


def coverage_of(ids: np.ndarray, *, resample_ids: np.ndarray) -> float:
    """Share of 200 data sets, each with a shift per sequence, whose 90 % interval holds the true mean 0."""
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        shift = generator.normal(size=ids.max() + 1)
        values = shift[ids] + 0.3 * generator.normal(size=ids.size)
        found = bootstrap_mean(values, resample_ids, generator, confidence=0.9, resamples=200)
        hits += found.low <= 0 <= found.high
    return hits / 200


def test_intervals_over_sequences_cover_and_intervals_over_tokens_do_not():
    ids = np.repeat(np.arange(30), 20)
    assert 0.83 <= coverage_of(ids, resample_ids=ids) <= 0.96
    assert coverage_of(ids, resample_ids=np.arange(ids.size)) < 0.5


def test_a_ratio_of_sums_is_exact_where_every_sequence_has_the_same():
    ids = [0, 0, 1, 1, 2]
    found = bootstrap_ratio(
        [1.0, 2.0, 3.0, 0.0, 6.0], [2.0, 4.0, 5.0, 1.0, 12.0], ids, np.random.default_rng(0)
    )
    assert (found.estimate, found.low, found.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("numerators", "denominators", "ids", "message"),
    [
        ([1.0, 2.0], [1.0, 1.0], [0, 0], "one sequence"),
        ([1.0, 2.0], [1.0, -1.0], [0, 1], "weights"),
        ([1.0, 2.0], [1.0, 0.0], [0, 1], "sum to 0"),
        ([1.0, 2.0], [1.0], [0, 1], "shape"),
    ],
)
def test_what_has_no_interval_is_refused(numerators, denominators, ids, message):
    with pytest.raises(InvalidValue, match=message):
        bootstrap_ratio(numerators, denominators, ids, np.random.default_rng(0))


def test_settings_without_meaning_are_refused():
    generator = np.random.default_rng(0)
    with pytest.raises(InvalidValue, match="resamples"):
        bootstrap_mean([1.0, 2.0], [0, 1], generator, resamples=10)
    for confidence in (0, 1, 1.5):
        with pytest.raises(InvalidValue, match="confidence"):
            bootstrap_mean([1.0, 2.0], [0, 1], generator, confidence=confidence)
    with pytest.raises(NonFinite):
        bootstrap_mean([1.0, np.nan], [0, 1], generator)
