from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from zerodrift.audit.measure import TokenTable
from zerodrift.audit.probes.parity import Gates
from zerodrift.audit.recorded.sides import Sides, agree, judge_numbers, judge_samples, with_trainer
from zerodrift.audit.recorded.timeline import Timeline
from zerodrift.core.request import SamplingParams
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome

Make = Callable[..., RecordedRollout]
Table = Callable[[Sequence[NDArray[np.float64]]], TokenTable]
GATES = Gates(mean=0.03, p90=0.075, k3=2e-3, veto=2.0)
STEPS = 30
ORDER = Timeline("step", tuple(range(STEPS)), np.arange(STEPS))


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_fault_of_the_last_steps_drowns_in_the_mean_and_is_still_found(table: Table) -> None:
    # Four rollouts a step; p90 and k3 would see it too, and are not asked.
    order = Timeline("step", tuple(range(STEPS)), np.repeat(np.arange(STEPS), 4))
    gates = GATES._replace(p90=9.0, k3=9.0)
    deltas = [np.full(10, 0.001 if step < 24 else 0.1) for step in range(STEPS) for _ in range(4)]
    side = judge_numbers("parity", table(deltas), order, gates, generator())
    assert side.overall.record.status is Outcome.PASS
    assert side.bad
    _, since = side.results
    assert (since.record.name, since.record.status) == ("parity-since", Outcome.FAIL)
    assert (since.record.evidence["first"], since.record.evidence["affected"]) == (24, 6)


def test_a_healthy_side_names_no_step(table: Table) -> None:
    deltas = [np.full(40, 0.001)] * (STEPS - 1) + [np.full(40, 0.04)]
    side = judge_numbers("trainer", table(deltas), ORDER, GATES, generator())
    assert not side.bad
    assert not side.overall.record.required
    assert side.results[1].record.name == "trainer-since"
    assert side.results[1].record.says == "no step stands out (e = 1)"


def test_greedy_rollouts_were_not_sampled(table: Table, rollout: Make) -> None:
    tokens = table([np.zeros(40)] * STEPS)
    greedy = [rollout(sampling=SamplingParams(temperature=0))] * STEPS
    side = judge_samples(tokens, ORDER, greedy)
    assert side.since is None
    assert not side.bad
    assert [result.record.vacuous for result in side.results] == [True]
    mixed = [rollout() if step < 10 else greedy[0] for step in range(STEPS)]
    assert judge_samples(tokens, ORDER, mixed).overall.record.evidence["tokens"] == 400


def test_the_trainers_numbers_take_the_engines_place(table: Table, rollout: Make) -> None:
    tokens = table([np.zeros(3)] * 3)
    scored = [rollout(), rollout(trainer_logprobs=(-1.4, -1.5, -1.6)), rollout()]
    assert with_trainer(tokens, [rollout()] * 3) is None
    found = with_trainer(tokens, scored)
    assert found is not None
    assert found.sequence.tolist() == [1, 1, 1]
    assert found.delta == pytest.approx([-0.1, 0.0, 0.1])
    assert not agree(tokens, found, GATES)
    assert agree(tokens, found, GATES._replace(mean=0.1))


def test_the_sampler_is_guilty_only_where_the_numbers_are_right(table: Table, rollout: Make) -> None:
    right = judge_numbers("parity", table([np.zeros(40)] * STEPS), ORDER, GATES, generator())
    wrong = judge_numbers("parity", table([np.full(40, 0.5)] * STEPS), ORDER, GATES, generator())
    likely = table([np.zeros(40)] * STEPS)
    object.__setattr__(likely, "contracted", np.full(40 * STEPS, -0.5))
    samples = judge_samples(likely, ORDER, [rollout()] * STEPS)
    assert list(Sides(right, samples, None).guilty) == ["sampler"]
    assert list(Sides(wrong, samples, None).guilty) == ["engine"]
    assert list(Sides(right, samples, wrong).guilty) == ["trainer", "sampler"]
    assert list(Sides(wrong, samples, right).guilty) == ["engine"]
    assert [result.record.name for result in Sides(right, samples, right).results] == [
        "parity",
        "parity-since",
        "sampling",
        "sampling-since",
        "parity",
        "parity-since",
    ]
