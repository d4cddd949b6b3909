"""How soon the monitor sees a fault, that it sees none where there is none, and what it costs.

`monitor_figures.py` plants them, `monitor_cost.py` measures, and both print the tables; here are the limits.
"""

from dataclasses import replace

import pytest

from zerodrift.monitor.decision import Code, Gap

MOST_STEPS = {
    "0.2 nats everywhere": 0,
    "0.2 nats on one replica of eight": 0,
    "0.2 nats in one environment of four": 0,
    "bias of +0.002": 20,
    "bias of -0.002": 20,
    "scale ×1.1": 20,
    "bias of 0.002 on one replica of eight": 20,
    "scale ×1.1 on one replica of eight": 20,
    "scale ×1.3 in one environment of four": 20,
    "head precision, ×1.44 (Fast-LLM#525)": 20,
    "stale weights, labelled fresh": 20,
    "stale weights, labelled stale": 5,
    "a ramp of 1 % a step": 20,
    "an update of 2 nats": 0,
    "rewards of two outputs swapped": 0,
    "one NaN": 0,
}
INCIDENTS = {
    "trl#5312: 0.015 → 0.201 in one step": 1,
    "vime#64: 0.011 → 0.036 over 30 steps": 10,
    "NeMo-RL#4018: grows with every update, here by 2 %": 15,
}


@pytest.fixture(scope="session")
def figures(script):
    return script("reliability/monitor_figures")


@pytest.fixture(scope="session")
def costs(script):
    return script("reliability/monitor_cost")


@pytest.mark.parametrize("name", MOST_STEPS)
def test_a_fault_is_seen_in_time_and_the_right_gap_is_named(figures, name: str) -> None:
    planted = figures.FAULTS[name]
    found = figures.first_bad(planted.fault)
    assert found is not None
    bad = [reason for reason in found.reasons if reason.bad]
    assert found.step - figures.SINCE <= MOST_STEPS[name]
    assert found.gap is planted.gap
    assert planted.where is None or planted.where in {reason.where for reason in bad}


def test_every_planted_fault_has_a_limit(figures) -> None:
    assert figures.FAULTS.keys() == MOST_STEPS.keys()
    assert figures.INCIDENTS.keys() == INCIDENTS.keys()


def test_the_same_stream_without_a_fault_is_healthy(figures) -> None:
    assert figures.first_bad(lambda given: given) is None


def test_a_swap_without_ids_is_not_seen(figures) -> None:
    """What the table would hide: values alone cannot show it."""
    assert figures.first_bad(lambda given: replace(given, rewards=given.rewards[::-1].copy())) is None


def test_a_nan_is_told_by_its_code(figures) -> None:
    found = figures.first_bad(figures.not_a_number)
    assert [reason.code for reason in found.reasons if reason.bad] == [Code.NOT_FINITE]


@pytest.mark.parametrize("name", INCIDENTS)
def test_a_public_incident_trips(figures, name: str) -> None:
    found, place = figures.incident(*figures.INCIDENTS[name])
    assert found is not None
    assert place + 1 <= INCIDENTS[name]
    assert found.gap is Gap.MISMATCH


def test_a_short_honest_training_raises_nothing(figures) -> None:
    first = {"sharp": (1.5, 1.6), "rounding": (0.03, 0.031), "length": (80, 100), "reward": (0.3, 0.33)}
    codes, _ = figures.honest(replace(figures.TRAINING, steps=60, **first))
    assert codes == {"OK": 60}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_steps_of_honest_training_are_never_quarantined(figures, seed: int) -> None:
    codes, _ = figures.honest(replace(figures.TRAINING, seed=seed))
    assert codes["QUARANTINE"] + codes["HALT"] == 0
    assert codes["OK"] + codes["WARN"] == 1000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_nor_are_a_thousand_steps_of_four_prompts_each(figures, seed: int) -> None:
    """A spread that is known from four prompts is Student's t: before charts knew that, one stood at 11.4 of 13."""
    codes, highest = figures.honest(replace(figures.SMALL, seed=seed))
    assert codes["QUARANTINE"] + codes["HALT"] == 0
    assert highest < 11


@pytest.mark.long
def test_traces_of_a_real_model_in_bf16_and_of_the_exact_engine(script) -> None:
    traces = script("reliability/monitor_traces")
    seen = {name: None if found is None else found.step - traces.SINCE for name, _, found in traces.table()}
    assert seen.pop("healthy") is None
    assert seen.pop("exact engine") is None
    assert seen.pop("head in bf16 (path/head-precision)") <= 20
    assert set(seen.values()) == {0}


def test_a_million_float32_tokens_cost_at_most_twenty_passes(costs) -> None:
    """A pass is the mean of k3 in float64: 7 where this was written, with ten processes for each core."""
    one, all_of = costs.seconds("mean k3, float64")
    assert all_of <= 20 * one


@pytest.mark.long
def test_they_cost_at_most_twenty_of_the_cheapest_passes(costs) -> None:
    """A pass is the mean ratio in float32, which is over before anything interrupts it: for a machine that is not busy."""
    one, all_of = costs.seconds("mean ratio, float32")
    assert all_of <= 20 * one


@pytest.mark.long
def test_memory_is_constant_over_a_hundred_thousand_steps(costs) -> None:
    first, *rest = costs.held(100_000, 10_000)
    assert max(each.state for each in rest) <= 1.02 * first.state
    assert max(each.blocks for each in rest) <= 1.02 * first.blocks
    # Python keeps what it once had; 4 MB is what an import costs.
    assert max(each.resident for each in rest) <= first.resident + 4096
