"""A batch of fewer tokens than a gate asks for: a warning, unless no chance could have made it."""

import numpy as np
import pytest

from zerodrift.monitor.baseline import WARM_UP
from zerodrift.monitor.decision import Code, State
from zerodrift.monitor.monitor import Monitor


def first(nats: float, tokens: int, share: float = 1.0):
    """A first batch whose tokens are so far off, a share of them."""
    rng = np.random.default_rng(0)
    engine = -rng.exponential(1.0, (4, tokens // 4)) - 3.0
    off = np.where(rng.random(engine.shape) < share, rng.normal(nats, nats / 2, engine.shape), 0.0)
    return Monitor().observe(
        behavior_logprobs=engine, old_logprobs=engine + off, versions=0, trainer_version=0
    )


def test_a_fault_of_a_fifth_of_a_nat_is_not_trained_on_however_few_tokens_show_it():
    decision = first(0.2, 100)
    assert decision.state is State.QUARANTINE
    assert decision.reasons[0].code is Code.GATE


@pytest.mark.parametrize(("nats", "tokens", "share"), [(0.04, 100, 1.0), (0.2, 8, 1.0), (0.9, 40, 0.1)])
def test_what_chance_may_have_made_warns(nats, tokens, share):
    """Little above the gate, of eight tokens, or by a few of forty."""
    decision = first(nats, tokens, share)
    assert decision.state is State.WARN
    assert {reason.code for reason in decision.reasons} == {Code.GATE}


def of_size(step, sequences, tokens):
    rng = np.random.default_rng(step)
    engine = -rng.exponential(1.0, (sequences, tokens)) - 0.5
    old = np.minimum(engine + rng.normal(0, 0.01, engine.shape), 0)
    return {"behavior_logprobs": engine, "old_logprobs": old, "versions": 0, "trainer_version": 0}


@pytest.mark.parametrize(("tokens", "batches"), [(5, 100), (25, 20), (50, WARM_UP), (500, WARM_UP)])
def test_a_warm_up_asks_for_batches_and_for_tokens(tokens, batches):
    monitor = Monitor()
    for step in range(batches):
        assert monitor.remembered.baseline is None
        monitor.observe(**of_size(step, 4, tokens))
    assert monitor.remembered.baseline.source == "first batches"
