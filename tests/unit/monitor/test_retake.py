"""A stream goes on after `retake`: a new canary halts no healthy one, and forgives no fault."""

import numpy as np
import pytest

from zerodrift.monitor.monitor import Monitor

SEQUENCES, TOKENS, STEPS = 128, 150, 60


def rounded(rng, nats, shape=(SEQUENCES, TOKENS)):
    """As bf16 rounds: the surer a token, the less it is off."""
    engine = -rng.exponential(1.0, shape)
    off = rng.normal(0, nats, shape) * (1 - np.exp(engine) + 1e-3)
    return engine, np.minimum(engine + off, 0)


def observe(monitor, step, engine, trainer):
    groups = {
        "prompt": [place // 4 for place in range(SEQUENCES)],
        "environment": ["ab"[place % 2] for place in range(SEQUENCES)],
        "replica": [place % 4 for place in range(SEQUENCES)],
    }
    return monitor.observe(
        behavior_logprobs=engine, old_logprobs=trainer, versions=step, trainer_version=step, groups=groups
    )


def shares(width):
    """Which tokens of a batch are of replica 1, or of environment b."""
    return (np.arange(SEQUENCES) % width == 1)[:, None]


def run(rng, monitor, steps, *, falls=0.0, part=None, times=1.0):
    """Observe, and say which steps were kept back, and by what."""
    bad = []
    for step in steps:
        nats = 0.03 * np.exp(-falls * max(0, step - 12))
        engine, trainer = rounded(rng, nats)
        if part is not None:
            trainer = np.where(part, np.minimum(engine + times * (trainer - engine), 0), trainer)
        found = observe(monitor, step, engine, trainer)
        if not found.train:
            bad.append((step, [(reason.code, reason.where) for reason in found.reasons if reason.bad]))
    return bad


@pytest.mark.parametrize("falls", [0.0, 0.002])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_stream_stays_healthy_after_a_canary(falls, seed):
    rng, monitor = np.random.default_rng(seed), Monitor()
    assert run(rng, monitor, range(STEPS), falls=falls) == []
    monitor.retake(*rounded(rng, 0.03 * np.exp(-falls * (STEPS - 12)), (200, 100)))
    assert run(rng, monitor, range(STEPS, STEPS + 40), falls=falls) == []


def test_a_replica_that_was_off_before_the_canary_is_found_after_it():
    rng, monitor = np.random.default_rng(3), Monitor()
    assert run(rng, monitor, range(20)) == []
    # Two batches are too few to be sure of it.
    assert run(rng, monitor, range(20, 22), part=shares(4), times=1.2) == []
    monitor.retake(*rounded(rng, 0.03, (200, 100)))
    bad = run(rng, monitor, range(22, 42), part=shares(4), times=1.2)
    assert bad
    assert any(("scale", "replica=1") in reasons for _, reasons in bad)


def test_an_environment_in_alarm_does_not_learn_its_fault_from_a_canary():
    rng, monitor = np.random.default_rng(4), Monitor()
    assert run(rng, monitor, range(20)) == []
    alarmed = run(rng, monitor, range(20, 27), part=shares(2), times=1.5)
    assert alarmed
    monitor.retake(*rounded(rng, 0.03, (200, 100)))
    bad = run(rng, monitor, range(27, 60), part=shares(2), times=1.5)
    assert any(step > 50 and ("scale", "environment=b") in reasons for step, reasons in bad)


def test_after_a_canary_a_fault_is_found_as_before():
    rng, monitor = np.random.default_rng(5), Monitor()
    assert run(rng, monitor, range(20)) == []
    monitor.retake(*rounded(rng, 0.03, (200, 100)))
    assert run(rng, monitor, range(20, 35)) == []
    bad = run(rng, monitor, range(35, 55), part=shares(2), times=1.3)
    assert any(where == "environment=b" for _, reasons in bad for _, where in reasons)
