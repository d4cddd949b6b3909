"""Do the weights from before explain the numbers? Then the update did not reach the engine, or not all of it.

Every rollout is scored once more, with the older checkpoint. A rollout belongs to the weights under which its numbers
are at the gate, and to none where neither fits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.audit.probes.result import ProbeResult, answered, found
from zerodrift.drift.gates import Gates
from zerodrift.records.evidence import PreviousWeightsEvidence
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome, Probe
from zerodrift.stats.arrays import Floats

NAME = Probe.PREVIOUS_WEIGHTS
MOSTLY = 20.0
"""An older checkpoint fits if it leaves less than a twentieth of the difference, as after an update in an audit."""
MOST_LABELS = 8
"""That are named; their number is always told."""
LONGEST_NUMBER = 20
"""Digits of a label that counts as a number."""
MIXED = 0.1
"""Share of rollouts at the newer weights from which on some replicas were updated and others were not."""


class Suspected(NamedTuple):
    """Rollouts of bad steps, with mean |Δ| of each from the model and from the weights before."""

    rollouts: Sequence[RecordedRollout]
    now: Floats
    before: Floats


class Older(NamedTuple):
    """The answer, and which of the rollouts have the numbers of the older weights."""

    result: ProbeResult
    at_old: NDArray[np.bool_]


def compare_weights(suspected: Suspected, gates: Gates, engine: str) -> Older:
    """Which weights does each of the suspected rollouts belong to?"""
    now, before = suspected.now, suspected.before
    at_old = (before <= np.maximum(gates.mean, now / MOSTLY)) & (now > gates.mean)
    at_new = (now <= gates.mean) & (before > gates.mean)
    neither = (now > gates.mean) & ~at_old
    evidence = PreviousWeightsEvidence(
        at_previous=int(at_old.sum()), at_model=int(at_new.sum()), at_neither=int(neither.sum())
    )
    if not at_old.any() or neither.sum() > at_old.sum():
        message = (
            f"the previous weights explain {at_old.sum()} of {len(now)} rollouts: they are not the cause"
        )
        return Older(answered(NAME, Outcome.PASS, message, evidence), np.zeros_like(at_old))
    mixed = at_new.sum() > max(1, MIXED * (at_new.sum() + at_old.sum()))
    message = _evidence(suspected.rollouts, at_old, float(now[at_old].mean()), float(before[at_old].mean()))
    cause = found(
        "weights/replica" if mixed else "weights/stale",
        engine,
        NAME,
        f"{message}, and {at_new.sum()} those of the model" if mixed else message,
        explained=1 - float(before[at_old].mean() / now[at_old].mean()),
    )
    return Older(answered(NAME, Outcome.FAIL, cause.evidence, evidence, causes=(cause,)), at_old)


def _in_order(label: str) -> tuple[int, str]:
    """Numbers by their value: 2 before 10."""
    return (int(label) if label.isdecimal() and len(label) < LONGEST_NUMBER else 0, label)


def _evidence(rollouts: Sequence[RecordedRollout], at_old: np.ndarray, now: float, before: float) -> str:
    old = [rollout for rollout, stale in zip(rollouts, at_old, strict=True) if stale]
    message = f"{len(old)} of {len(rollouts)} rollouts have the numbers of the previous weights"
    steps = sorted({rollout.step for rollout in old if rollout.step is not None})
    if steps:
        message += f", in steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f", in step {steps[0]}"
    if labels := sorted({each.version for each in old if each.version is not None}, key=_in_order):
        more = f" and {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else ""
        word = "label" if len(labels) == 1 else "labels"
        message += f", under the {word} {', '.join(labels[:MOST_LABELS])}{more}"
    return f"{message}: mean |Δ| {before:.2g} from those and {now:.2g} from the model"
