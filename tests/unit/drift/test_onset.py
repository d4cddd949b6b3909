"""Healthy recordings are simulated, by the hundred: Δ of rounding, and tokens that are drawn as they claim."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from zerodrift.drift.onset import Since, drift_since, odds, sampling_since
from zerodrift.drift.strata import Timeline
from zerodrift.drift.tokens import TokenTable

Floats = NDArray[np.float64]
Make = Callable[[Sequence[Floats]], TokenTable]
GATE = 0.03


def order(steps: int, per_step: int = 1, unit: str = "step") -> Timeline:
    return Timeline(unit, tuple(range(10, 10 + steps)), np.repeat(np.arange(steps), per_step))


def rounding(generator: np.random.Generator, mean: float, tokens: int = 40) -> Floats:
    """Laplacian Δ with this mean |Δ|: heavier tails than rounding has."""
    return generator.laplace(scale=mean, size=tokens)


def sampled(
    generator: np.random.Generator, tokens: int, sharper: float = 1.0
) -> tuple[Floats, Floats, Floats]:
    """log p, entropy and variance of tokens drawn from random softmaxes; `sharper` ones from a colder one."""
    logits = generator.normal(scale=2.0, size=(tokens, 30))
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    p, q = np.exp(logprobs), np.exp(logprobs * sharper)
    entropy = -(p * logprobs).sum(axis=1)
    variance = (p * (logprobs + entropy[:, None]) ** 2).sum(axis=1)
    drawn = (generator.random((tokens, 1)) > (q / q.sum(axis=1, keepdims=True)).cumsum(axis=1)).sum(axis=1)
    return logprobs[np.arange(tokens), drawn.clip(max=29)], entropy, variance


def samples(make: Make, parts: Sequence[tuple[Floats, Floats, Floats]]) -> TokenTable:
    table = make([np.zeros(len(part[0])) for part in parts])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    for name, values in zip(("contracted", "entropy", "variance"), columns, strict=True):
        object.__setattr__(table, name, values)
    return table


def test_200_healthy_recordings_raise_no_alarm(table):
    generator = np.random.default_rng(0)
    for number in range(200):
        # From half the gate, as healthy bf16 engines have it, to the gate itself, where the null ends.
        mean = GATE * (0.5 + 0.5 * number / 199)
        rollouts = [rounding(generator, mean, 10) for _ in range(20 * 4)]
        found = drift_since(table(rollouts), order(20, 4), GATE)
        assert not found.alarm
        assert found.log_e < np.log(100)


def test_200_honest_samplers_raise_no_alarm(table):
    generator = np.random.default_rng(1)
    highest = []
    for _ in range(200):
        tokens = samples(table, [sampled(generator, 60) for _ in range(8)])
        found = sampling_since(tokens, order(8), np.isfinite(tokens.contracted))
        assert not found.alarm
        highest.append(found.log_e)
    # By Ville's inequality one in a hundred may reach e = 100; far fewer should.
    assert np.mean(np.array(highest) > np.log(100)) <= 0.01


@pytest.mark.parametrize("healthy", [0, 1, 7, 15])
@pytest.mark.parametrize("times", [3.0, 30.0])
def test_a_change_is_dated_to_the_step(healthy, times, table):
    generator = np.random.default_rng(2)
    means = [0.5 * GATE] * healthy + [times * GATE] * 14
    found = drift_since(table([rounding(generator, mean) for mean in means]), order(len(means)), GATE)
    assert found.alarm
    assert found.began == healthy
    assert found.first == 10 + healthy
    assert found.affected == tuple(range(healthy, len(means)))
    start = "bad from the first recorded step (10) on" if healthy == 0 else f"since step {10 + healthy}"
    assert found.message.startswith(f"{start}; odds ")


def test_a_single_wild_step_is_no_alarm_and_a_passing_fault_is_told_as_one(table):
    generator = np.random.default_rng(3)
    wild = [rounding(generator, 100.0 if step == 5 else 0.01) for step in range(12)]
    assert not drift_since(table(wild), order(12), GATE).alarm
    passing = [rounding(generator, 0.6 if 3 <= step < 9 else 0.01) for step in range(12)]
    found = drift_since(table(passing), order(12), GATE)
    assert found.alarm
    assert found.message.startswith("since step 13, last seen in step 18; odds ")


def test_a_wild_token_barely_moves_its_step(table):
    delta = np.full(1000, 0.01)
    delta[3] = -np.inf
    found = drift_since(table([delta]), order(1), GATE)
    assert found.sizes[0] == pytest.approx(0.01 / GATE + 0.02, abs=1e-3)


def test_steps_that_nobody_scored_are_left_out(table):
    tokens = table([np.full(40, 0.3)] * 4)
    places = Timeline("step", (1, 2, 3, 4, 5, 6), np.array([1, 2, 4, 5]))
    found = drift_since(tokens, places, GATE)
    assert found.began == 1
    assert found.affected == (1, 2, 4, 5)
    assert found.sizes[[0, 3]].tolist() == [0.0, 0.0]


def test_a_step_of_many_rollouts_says_more_than_one_of_few(table):
    generator = np.random.default_rng(6)
    rollouts = [rounding(generator, 2 * GATE, 20) for _ in range(8 * 6)]
    one = drift_since(table([np.concatenate(rollouts[i : i + 6]) for i in range(0, 48, 6)]), order(8), GATE)
    many = drift_since(table(rollouts), order(8, 6), GATE)
    assert one.sizes == pytest.approx(many.sizes)
    assert not one.alarm
    assert many.alarm
    assert many.began == 0


def test_little_evidence_is_called_little():
    def said(log_e, began=1):
        return Since("line", (1, 11), np.ones(2), began, log_e, False, (1,)).message

    assert (
        said(np.log(30))
        == "probably since line 11; odds 30 : 1 over 2 blocks of lines, too little to be sure"
    )
    assert said(np.log(30), 0).startswith("bad from the first recorded line (1) on; odds 30 : 1")
    # No evidence is no date.
    assert (
        said(np.log(1.5)) == said(np.log(1.5), 0) == "which line it began with cannot be told (odds 1.5 : 1)"
    )


def test_healthy_and_hardly_anything(table):
    calm, off = np.full(40, 0.001), np.full(40, 0.06)
    assert drift_since(table([calm]), order(1), GATE).message == "no step stands out (odds 1 : 1)"
    found = drift_since(table([calm, off]), order(2, unit="line"), GATE)
    assert (found.first, found.alarm) == (11, False)
    assert "since" not in found.message


@pytest.mark.parametrize("sharper", [1.5, 0.6])
def test_samples_that_are_sharper_or_flatter_are_dated(sharper, table):
    generator = np.random.default_rng(4)
    parts = [sampled(generator, 200, 1.0 if step < 5 else sharper) for step in range(12)]
    tokens = samples(table, parts)
    found = sampling_since(tokens, order(12), np.isfinite(tokens.contracted))
    assert found.alarm
    assert found.began is not None
    assert abs(found.began - 5) <= 2
    assert found.affected == tuple(range(found.began, 12))


def test_too_little_was_drawn_to_bet_on(table):
    tokens = samples(table, [sampled(np.random.default_rng(5), 5)])
    found = sampling_since(tokens, order(1), np.isfinite(tokens.contracted))
    assert (found.began, found.log_e, found.alarm, found.affected) == (None, 0.0, False, ())


def test_odds_for_people():
    assert odds(0.0) == "odds 1 : 1"
    assert odds(np.log(5.784)) == "odds 5.78 : 1"
    assert odds(np.log(1.1321e6)) == "odds 1,130,000 : 1"
    assert odds(2302.6) == "odds 10^1000 : 1"
    assert Since("step", (1,), np.zeros(1), 0, 2302.6, True, (0,)).message.endswith(
        "odds 10^1000 : 1 over 1 step"
    )
