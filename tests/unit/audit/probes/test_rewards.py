"""Rewards of two sides, made up: what the model is does not matter to what is compared."""

import numpy as np
import pytest
from scipy import stats

from zerodrift.audit.probes import rewards as probe
from zerodrift.audit.probes.rewards import ALPHA, rewards
from zerodrift.audit.tasks import Rewarded
from zerodrift.records.verdict import Outcome

PROMPTS, SAMPLES = 32, 4
AS_SHIPPED = (probe.QUICK, probe.THOROUGH)


@pytest.fixture(autouse=True)
def _as_few_relabellings_as_can_fail(monkeypatch):
    monkeypatch.setattr(probe, "QUICK", 999)
    monkeypatch.setattr(probe, "THOROUGH", 29_999)


def test_the_thorough_look_can_fail_and_the_quick_one_cannot():
    quick, thorough = AS_SHIPPED
    assert quick < probe.TESTS / ALPHA < thorough / 4


def given(rewards_PS: np.ndarray) -> list[Rewarded]:
    return [Rewarded(prompt, float(value)) for prompt, row in enumerate(rewards_PS) for value in row]


def solved(rng: np.random.Generator, ability_P: np.ndarray, samples: int = SAMPLES) -> list[Rewarded]:
    return given(rng.random((len(ability_P), samples)) < ability_P[:, None])


def test_equal_sides_pass_with_means_difference_and_interval():
    rng = np.random.default_rng(0)
    ability = rng.random(PROMPTS)
    result = rewards("toy", solved(rng, ability), solved(rng, ability), seed=0)
    assert result.record.status is Outcome.PASS
    assert result.causes == ()
    evidence = result.record.evidence
    assert evidence["task"] == "toy"
    assert (evidence["prompts"], evidence["prompts_left_out"]) == (PROMPTS, 0)
    assert evidence["engine_rewards"] == evidence["reference_rewards"] == PROMPTS * SAMPLES
    low, middle, high = (float(evidence[f"difference{end}"]) for end in ("_low", "", "_high"))
    assert low < middle < high
    assert middle == pytest.approx(float(evidence["engine_mean"]) - float(evidence["reference_mean"]))
    assert f"difference {middle:+.2g} [{low:+.2g}, {high:+.2g}]" in result.record.message
    assert float(evidence["least_p"]) < ALPHA < float(evidence["p"])


@pytest.mark.parametrize("kind", ["graded", "solved"])
def test_p_values_of_equal_sides_are_uniform_or_larger(monkeypatch, kind):
    monkeypatch.setattr(probe, "QUICK", 199)
    monkeypatch.setattr(probe, "THOROUGH", 999)
    found = []
    for number in range(200):
        rng = np.random.default_rng(number)
        # Prompts of very different difficulty: sides that were compared without regard to them would never differ.
        level = rng.random(16) if kind == "solved" else 10 * rng.normal(size=16)
        draw = rng.random((2, 16, 2)) if kind == "solved" else rng.normal(size=(2, 16, 2))
        made = draw < level[:, None] if kind == "solved" else draw + level[:, None]
        evidence = rewards("toy", given(made[0]), given(made[1]), seed=number).record.evidence
        found.append([float(evidence[name]) for name in ("p_mean", "p_distribution")])
    for p_values in np.array(found).T:
        # Ties between rewards of 0 and 1 make p-values large, never small.
        alternative = "two-sided" if kind == "graded" else "greater"
        assert stats.kstest(p_values, "uniform", alternative=alternative).pvalue > 1e-3


@pytest.mark.parametrize("worse", [True, False])
def test_another_ability_fails(worse):
    """An engine at another temperature, say: every prompt is solved half as often."""
    rng = np.random.default_rng(1)
    ability = rng.random(PROMPTS)
    sides = [solved(rng, ability / 2), solved(rng, ability)]
    engine, reference = sides if worse else sides[::-1]
    result = rewards("toy", engine, reference, seed=0)
    assert result.record.status is Outcome.FAIL
    (cause,) = result.causes
    assert (cause.cause, cause.found_by, cause.gating) == ("unexplained", "rewards", True)
    assert cause.evidence == result.record.message
    difference = float(result.record.evidence["difference"])
    assert (difference < 0) is worse
    assert f"difference {difference:+.2g}" in cause.evidence


def test_a_difference_smaller_than_that_between_prompts_is_seen():
    rng = np.random.default_rng(2)
    hard = 100 * rng.normal(size=(PROMPTS, 1))
    engine, reference = (rng.normal(size=(PROMPTS, SAMPLES)) + hard for _ in range(2))
    assert rewards("toy", given(engine + 1), given(reference), seed=0).record.status is Outcome.FAIL
    assert rewards("toy", given(engine), given(reference), seed=0).record.status is Outcome.PASS


def test_a_spread_that_the_mean_hides_fails_by_the_distribution():
    rng = np.random.default_rng(3)
    engine, reference = rng.normal(size=(2, 64, SAMPLES))
    evidence = rewards("toy", given(3 * engine), given(reference), seed=0).record.evidence
    assert float(evidence["p_distribution"]) < ALPHA / 2 < float(evidence["p_mean"])
    assert evidence["p"] == 2 * float(evidence["p_distribution"])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_one_value_everywhere_is_vacuous(value):
    side = given(np.full((PROMPTS, SAMPLES), value))
    result = rewards("toy", side, side, seed=0)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert f"every reward is {value:g}, on both sides" in result.record.message
    assert ("never solved by this model" in result.record.message) is (value == 0)
    assert "another task" in result.record.message


@pytest.mark.parametrize(("prompts", "status"), [(17, Outcome.INCONCLUSIVE), (18, Outcome.FAIL)])
def test_fewer_prompts_than_could_ever_fail_are_vacuous(prompts, status):
    """With one answer a side, 2 · 2 · 2^-17 is 3.1e-5 and 2 · 2 · 2^-18 is 1.5e-5; the limit is 2.5e-5."""
    engine, reference = np.zeros((prompts, 1)), np.ones((prompts, 1))
    if status is Outcome.INCONCLUSIVE:
        # One away from the worst case, which would fail by luck.
        reference[0], engine[0] = 0, 1
    result = rewards("toy", given(engine), given(reference), seed=0)
    assert result.record.status is status
    assert result.record.vacuous is (status is Outcome.INCONCLUSIVE)
    assert result.record.evidence["least_p"] == pytest.approx(4 * 0.5**prompts)


def test_rewards_that_differ_too_rarely_are_vacuous():
    """However the three that are solved were dealt over the sides, they could have been dealt so by chance."""
    engine, reference = np.zeros((2, PROMPTS, SAMPLES))
    reference[:3, 0] = 1
    result = rewards("toy", given(engine), given(reference), seed=0)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert result.record.evidence["least_p"] == pytest.approx(2 * 2 * 0.5**3)
    assert "(--trials)" in result.record.message


def test_a_greedy_engine_that_agrees_has_shown_nothing():
    easy = np.tile((np.arange(PROMPTS) % 2)[:, None], (1, 1))
    result = rewards("toy", given(easy), given(easy), seed=0)
    assert (result.record.vacuous, result.record.evidence["least_p"]) == (True, 1.0)


def test_prompts_without_an_answer_of_one_side_are_counted_and_left_out():
    rng = np.random.default_rng(4)
    ability = rng.random(PROMPTS)
    engine, reference = solved(rng, ability), solved(rng, ability)
    lost = [each for each in engine if each.prompt not in (5, 9)][1:]
    record = rewards("toy", lost, reference, seed=0).record
    assert record.message.endswith("; 2 prompts were answered by one side alone and are left out")
    evidence = record.evidence
    assert (evidence["prompts"], evidence["prompts_left_out"]) == (PROMPTS - 2, 2)
    assert evidence["engine_rewards"] == (PROMPTS - 2) * SAMPLES - 1
    assert evidence["reference_rewards"] == (PROMPTS - 2) * SAMPLES


@pytest.mark.parametrize("shared", [0, 1])
def test_two_prompts_at_least(shared):
    engine = [Rewarded(number, float(number)) for number in range(shared)]
    result = rewards("toy", engine, [Rewarded(0, 0.0), Rewarded(1, 1.0)], seed=0)
    assert result.record.vacuous
    assert f"both sides: {shared}" in result.record.message


def test_the_same_seed_gives_the_same_numbers():
    rng = np.random.default_rng(5)
    engine, reference = (given(rng.normal(size=(PROMPTS, SAMPLES))) for _ in range(2))
    assert rewards("toy", engine, reference, seed=7) == rewards("toy", engine, reference, seed=7)
