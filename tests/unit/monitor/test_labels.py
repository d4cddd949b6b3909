"""Labels come and go over a training: pods have new names, and memory is constant."""

import numpy as np
import pytest

from zerodrift.monitor.decision import Code
from zerodrift.monitor.groups import MOST_LABELS
from zerodrift.monitor.monitor import Monitor

SEQUENCES, TOKENS = 32, 40


def observe(monitor, rng, labels, *, off=0.0):
    """`off`: nats by which the first label's tokens are more off than the others'."""
    behavior = -rng.exponential(1.0, (SEQUENCES, TOKENS)) - 0.5
    nats = np.where(np.array(labels) == labels[0], 0.01 + off, 0.01)[:, None]
    old = np.minimum(behavior + rng.normal(0, 1, behavior.shape) * nats, 0)
    return monitor.observe(
        behavior_logprobs=behavior,
        old_logprobs=old,
        versions=0,
        trainer_version=0,
        groups={"replica": labels},
    )


def test_a_training_whose_pods_are_renamed_goes_on_and_finds_the_bad_one():
    rng, monitor = np.random.default_rng(0), Monitor()
    for step in range(300):
        found = observe(monitor, rng, [f"pod-{step // 6}-{place % 4}" for place in range(SEQUENCES)])
        assert found.train
        assert len(monitor.remembered.labels.seen) <= MOST_LABELS
    assert sum(key.startswith("replica=") for key in monitor.remembered.tracks) <= MOST_LABELS
    names = [f"pod-new-{place % 4}" for place in range(SEQUENCES)]
    while (found := observe(monitor, rng, names, off=0.01)).train:
        assert found.step < 320
    assert "replica=pod-new-0" in {reason.where for reason in found.reasons if reason.bad}


@pytest.mark.parametrize(("names", "told"), [(64, 0), (80, 6)])
def test_more_labels_than_can_be_watched_are_said_once_in_a_while(names, told):
    rng, monitor = np.random.default_rng(1), Monitor()
    said = []
    for step in range(300):
        first = step * SEQUENCES
        found = observe(monitor, rng, [str((first + place) % names) for place in range(SEQUENCES)])
        said += [reason for reason in found.reasons if reason.where == "replica"]
    assert len(said) == told
    assert {(reason.code, reason.bad) for reason in said} == ({(Code.NOT_OBSERVED, False)} if told else set())


def test_a_label_that_was_not_seen_for_long_is_forgotten_first():
    rng, monitor = np.random.default_rng(2), Monitor()
    observe(monitor, rng, ["old"] * SEQUENCES)
    for name in range(MOST_LABELS):
        observe(monitor, rng, ["stays"] * (SEQUENCES // 2) + [str(name)] * (SEQUENCES // 2))
    kept = {*monitor.remembered.labels.seen}
    assert kept == {"replica=stays", *(f"replica={name}" for name in range(1, MOST_LABELS))}
    assert {key for key in monitor.remembered.tracks if key.startswith("replica=")} <= kept
