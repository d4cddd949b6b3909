"""When two kinds of training differ: by more than their seeds, and by enough to matter."""

import numpy as np
import pytest

from zerodrift.records.verdict import Outcome
from zerodrift.train.comparison import RunSeries, band, judge

STEPS = 12


def runs(rng, count=3, steps=STEPS, *, halted=False, **given):
    """Noise around a level for each quantity that is given; a level may be a series."""
    return [
        RunSeries(
            seed=seed, directory=f"run-{seed}", steps=steps, halted=halted,
            values={
                name: tuple(np.broadcast_to(level, steps) + rng.normal(0, 0.01, steps)) for name, level in given.items()
            },
        )
        for seed in range(count)
    ]  # fmt: skip


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_equal_kinds_differ_in_at_most_one_comparison_of_twenty(rng):
    levels = {"reward": 0.5, "clip_rate": 0.1, "ess": 0.9, "entropy": 1.0, "mismatch": 0.1}
    found = [judge(runs(rng, **levels), runs(rng, **levels)).outcome for _ in range(400)]
    assert found.count(Outcome.FAIL) <= 20
    assert found.count(Outcome.INCONCLUSIVE) == 0


def test_what_differs_is_named_with_the_step_since_which(rng):
    late = np.where(np.arange(STEPS) < 7, 0.0, 0.3)
    judged = judge(runs(rng, reward=0.5, mismatch=0.1), runs(rng, reward=0.5, mismatch=0.1 + late))
    assert (judged.outcome, judged.message) == (Outcome.FAIL, "differs in mismatch since step 7")
    assert judged.since == 7
    (reward, mismatch) = judged.rows
    assert (reward.differs, reward.since) == (False, None)
    assert mismatch.difference == pytest.approx(0.3 * 5 / 12, abs=0.02)


def test_what_began_first_is_told_first(rng):
    late = np.where(np.arange(STEPS) < 6, 0.0, 0.3)
    judged = judge(runs(rng, reward=0.5, mismatch=0.1), runs(rng, reward=0.5 - late, mismatch=0.5))
    assert judged.message == "differs in mismatch since step 0; in reward since step 6"


def test_what_began_late_is_seen_by_the_last_third_alone(rng):
    noisy = [runs(rng, 1, reward=level)[0] for level in (0.3, 0.5, 0.7)]
    again = [runs(rng, 1, reward=level)[0] for level in (0.3, 0.5, 0.7)]

    def at_the_end(series, value):
        values = {"reward": (*series.values["reward"][:8], *[value + 0.001 * series.seed] * 4)}
        return RunSeries(
            seed=series.seed, directory="", steps=STEPS, halted=False, values={**series.values, **values}
        )

    judged = judge(
        [at_the_end(each, 0.5 + 0.01 * place) for place, each in enumerate(noisy)],
        [at_the_end(each, 0.9 + 0.01 * place) for place, each in enumerate(again)],
    )
    (row,) = judged.rows
    assert (row.differs, row.of) == (True, "last 4 steps")
    assert row.second.mean - row.first.mean == pytest.approx(row.difference)


@pytest.mark.parametrize(
    ("name", "level", "other"), [("mismatch", 1e-6, 2e-6), ("mismatch", 0.012, 0.0135), ("ess", 1.0, 0.9995)]
)
def test_what_three_runs_show_and_no_training_feels_is_no_difference(name, level, other):
    def exact(value):
        return [
            RunSeries(seed=seed, directory="", steps=3, halted=False, values={name: (value * (1 + 1e-5 * seed),) * 3})
            for seed in range(3)
        ]  # fmt: skip

    judged = judge(exact(level), exact(other))
    (row,) = judged.rows
    assert row.p_value < 0.001
    assert (row.differs, judged.outcome) == (False, Outcome.PASS)


def test_a_number_that_is_always_the_same_is_equal_and_another_is_not():
    def constant(value):
        return [
            RunSeries(seed=seed, directory="", steps=3, halted=False, values={"lag": (value,) * 3})
            for seed in range(3)
        ]

    assert judge(constant(0.0), constant(0.0)).outcome is Outcome.PASS
    assert judge(constant(0.0), constant(1.0)).message == "differs in lag since step 0"


def test_a_monitor_that_halts_every_run_of_one_side_has_found_something(rng):
    sound, broken = runs(rng, reward=0.5), runs(rng, steps=3, halted=True, reward=0.5)
    judged = judge(sound, broken)
    assert judged.outcome is Outcome.FAIL
    assert judged.message == "the monitor halted every run of B and none of the other"
    assert judged.steps == 3
    assert judge(broken, broken).outcome is Outcome.PASS
    assert judge(sound, [*sound[:2], broken[0]]).outcome is Outcome.PASS


def test_one_run_of_each_cannot_be_judged(rng):
    judged = judge(runs(rng, 1, reward=0.1), runs(rng, 1, reward=0.9))
    assert judged.outcome is Outcome.INCONCLUSIVE
    assert "give --seeds 3" in judged.message


def test_a_quantity_that_not_every_run_shows_is_not_compared(rng):
    sound = runs(rng, reward=0.5, entropy=1.0)
    judged = judge(sound, runs(rng, reward=0.5))
    assert [row.name for row in judged.rows] == ["reward"]


def test_a_band_has_the_least_and_the_largest_of_the_runs():
    series = [
        RunSeries(seed=seed, directory="", steps=2, halted=False, values={"reward": values})
        for seed, values in enumerate([(0.0, 0.5), (1.0, None)])
    ]
    found = band(series, "reward", 2)
    assert (found.mean, found.low, found.high) == (0.625, 0.25, 1.0)
    assert found.steps == ((0.5, 0.0, 1.0), None)
