from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from zerodrift.audit.recorded.sides import Sides, agree, judge_numbers, judge_samples, with_trainer
from zerodrift.core.request import SamplingParams
from zerodrift.drift.gates import Gates
from zerodrift.drift.strata import Timeline
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome, Probe

Make = Callable[..., RecordedRollout]
GATES = Gates(mean=0.03, p90=0.075, k3=2e-3, veto=2.0)
STEPS = 30
ORDER = Timeline("step", tuple(range(STEPS)), np.arange(STEPS))


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_fault_of_the_last_steps_drowns_in_the_mean_and_is_still_found(table):
    # Four rollouts a step; p90 and k3 would see it too, and are not asked.
    order = Timeline("step", tuple(range(STEPS)), np.repeat(np.arange(STEPS), 4))
    gates = GATES._replace(p90=9.0, k3=9.0)
    deltas = [np.full(10, 0.001 if step < 24 else 0.1) for step in range(STEPS) for _ in range(4)]
    side = judge_numbers(Probe.PARITY, table(deltas), order, gates, generator())
    assert side.overall.record.status is Outcome.PASS
    assert side.bad
    _, since = side.results
    assert (since.record.name, since.record.status) == ("parity-since", Outcome.FAIL)
    assert (since.record.evidence["first"], since.record.evidence["affected"]) == (24, 6)


def test_a_healthy_side_names_no_step(table):
    deltas = [np.full(40, 0.001)] * (STEPS - 1) + [np.full(40, 0.04)]
    side = judge_numbers(Probe.TRAINER, table(deltas), ORDER, GATES, generator())
    assert not side.bad
    assert not side.overall.record.required
    assert side.results[1].record.name == "trainer-since"
    assert side.results[1].record.message == "no step stands out (odds 1 : 1)"


def distinct(rollout: Make, temperature: float = 1.0) -> list[RecordedRollout]:
    return [
        rollout(prompt=(1, step), sampling=SamplingParams(temperature=temperature)) for step in range(STEPS)
    ]


def likeliest(tokens: TokenTable, sequences: Sequence[int] | range) -> TokenTable:
    """In these sequences every token is the likeliest: half its own mass lies before its place."""
    places = np.where(np.isin(tokens.sequence, sequences), np.exp(-1.5) / 2, tokens.by_likelihood)
    return replace(tokens, by_likelihood=places)


def test_greedy_rollouts_took_the_likeliest_token(table, rollout):
    tokens = table([np.zeros(40)] * STEPS)
    greedy = distinct(rollout, temperature=0)
    sound = judge_samples(likeliest(tokens, range(STEPS)), ORDER, greedy)
    assert (sound.since, sound.bad) == (None, False)
    assert [(each.record.name, each.record.status) for each in sound.results] == [("greedy", Outcome.PASS)]
    drawn = judge_samples(tokens, ORDER, greedy)
    assert drawn.bad
    assert "tokens are not the likeliest, though nothing was to be drawn" in drawn.overall.record.message


def test_tokens_that_cannot_be_drawn_are_no_samples(table, rollout):
    impossible = replace(table([np.zeros(40)] * STEPS), contracted=np.full(40 * STEPS, -np.inf))
    (only,) = judge_samples(impossible, ORDER, distinct(rollout)).results
    assert (only.record.name, only.record.message) == ("sampling", "needs at least 200 tokens; there are 0")


def test_where_some_rollouts_are_greedy_both_kinds_are_judged(table, rollout):
    tokens = table([np.zeros(40)] * STEPS)
    drawn, greedy = distinct(rollout), distinct(rollout, temperature=0)
    mixed = [*drawn[:10], *greedy[10:]]
    sound = judge_samples(likeliest(tokens, range(10, STEPS)), ORDER, mixed)
    assert not sound.bad
    assert sound.overall.record.evidence["tokens"] == 400
    assert [each.record.name for each in sound.results] == ["sampling", "sampling-since", "greedy"]
    assert [each.record.required for each in sound.results] == [False, False, True]
    wrong = judge_samples(tokens, ORDER, mixed)
    assert wrong.bad
    assert [each.record.name for each in wrong.results] == ["greedy", "sampling", "sampling-since"]
    # A few of one kind cannot be judged, and do not stand in the way of the others.
    few = judge_samples(tokens, ORDER, [*drawn[:28], *greedy[28:]]).results
    assert [(each.record.name, each.record.required) for each in few if each.record.vacuous] == [
        ("greedy", False)
    ]


def test_a_copy_is_no_evidence(table, rollout):
    tokens = table([np.zeros(40)] * STEPS)
    copies = [rollout(logprobs=(-9.0, -9.0, -9.0))] * STEPS
    side = judge_samples(tokens, ORDER, copies)
    assert side.overall.record.vacuous
    assert side.overall.record.message == "needs at least 200 tokens; there are 40"
    # Short answers come again by chance: without the second "yes" the first would be too rare.
    likely = [rollout(logprobs=(-0.1, -0.1, -0.1))] * STEPS
    assert judge_samples(tokens, ORDER, likely).overall.record.evidence["tokens"] == 40 * STEPS


def test_the_trainers_numbers_take_the_engines_place(table, rollout):
    tokens = table([np.zeros(3)] * 3)
    scored = [rollout(), rollout(trainer_logprobs=(-0.9, -1.0, -1.1)), rollout()]
    assert with_trainer(tokens, [rollout()] * 3) is None
    found = with_trainer(tokens, scored)
    assert found is not None
    assert found.sequence.tolist() == [1, 1, 1]
    assert found.delta == pytest.approx([-0.1, 0.0, 0.1])
    assert not agree(tokens, found, GATES)
    assert agree(tokens, found, GATES._replace(mean=0.1))


def test_the_sampler_is_guilty_only_where_the_numbers_are_right(table, rollout):
    right = judge_numbers(Probe.PARITY, table([np.zeros(40)] * STEPS), ORDER, GATES, generator())
    wrong = judge_numbers(Probe.PARITY, table([np.full(40, 0.5)] * STEPS), ORDER, GATES, generator())
    likely = table([np.zeros(40)] * STEPS)
    object.__setattr__(likely, "contracted", np.full(40 * STEPS, -0.5))
    samples = judge_samples(likely, ORDER, distinct(rollout))
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
