from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from zerodrift.audit.measure import measure
from zerodrift.audit.perturb import perturbed
from zerodrift.audit.recorded.notation_readings import size
from zerodrift.audit.recorded.timeline import observer
from zerodrift.audit.recorded.weights import Older, Suspected, compare_weights
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.core.request import SamplingParams
from zerodrift.drift.gates import Gates
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome

GATES = Gates(mean=1e-5, p90=3e-5, k3=1e-6, veto=2.0)
OUTPUT = (40, 77, 301, 12, 9, 260)


@pytest.fixture(scope="module")
def older():
    return ReferenceBackend("testbed:llama")


@pytest.fixture(scope="module")
def newer(older):
    return Teacher(perturbed(older.model, 1).new, layout=Layout.PADDED)


def rollouts(teachers: Sequence[Teacher], **fields: object) -> list[RecordedRollout]:
    """One rollout by each of these weights."""
    made = []
    for number, teacher in enumerate(teachers):
        prompt = (0, 5 + number, 9)
        numbers = teacher.score([prompt + OUTPUT])[0][len(prompt) - 1 :]
        values = {"step": number, "sampling": SamplingParams(), "logprobs": tuple(numbers), **fields}
        made.append(RecordedRollout(source="d", line=number + 1, prompt=prompt, output=OUTPUT, **values))
    return made


def compare(recorded: list[RecordedRollout], newer: Teacher, older: Teacher) -> Older:
    observed = [observer(())(rollout) for rollout in recorded]
    sizes = [
        np.array([size(item.delta) for item in measure(teacher, observed, ())]) for teacher in (newer, older)
    ]
    return compare_weights(Suspected(recorded, *sizes), GATES, "vllm")


def test_all_at_the_older_weights_is_stale(newer, older):
    result, at_old = compare(rollouts([older.teacher] * 4, version="7"), newer, older.teacher)
    assert result.record.status is Outcome.FAIL
    (cause,) = result.causes
    assert cause.cause == "weights/stale"
    assert cause.explained > 0.99
    assert cause.evidence.startswith(
        "4 of 4 rollouts have the numbers of the previous weights, in steps 0 to 3, under the label 7: mean |Δ| "
    )
    assert at_old.all()


def test_every_label_is_named_or_counted(newer, older):
    """Twelve labels of which four were named read as if there were four."""
    made = [
        msgspec.structs.replace(each, version=str(number))
        for number, each in enumerate(rollouts([older.teacher] * 12))
    ]
    six = compare(made[:6], newer, older.teacher).result.causes[0].evidence
    assert "under the labels 0, 1, 2, 3, 4, 5: mean" in six
    twelve = compare(made, newer, older.teacher).result.causes[0].evidence
    assert "under the labels 0, 1, 2, 3, 4, 5, 6, 7 and 4 more: mean" in twelve


def test_one_step_and_no_steps(newer, older):
    one = compare(rollouts([older.teacher] * 2, step=3), newer, older.teacher)
    assert "weights, in step 3: mean" in one.result.causes[0].evidence
    none = compare(rollouts([older.teacher] * 2, step=None), newer, older.teacher)
    assert "of the previous weights: mean" in none.result.causes[0].evidence


def test_some_at_the_newer_ones_is_a_replica(newer, older):
    result, _ = compare(rollouts([older.teacher, newer, newer, older.teacher]), newer, older.teacher)
    assert [cause.cause for cause in result.causes] == ["weights/replica"]
    assert result.causes[0].evidence.endswith(", and 2 those of the model")


def test_neither_is_another_fault(newer, older):
    elsewhere = Teacher(perturbed(older.model, 2).new, layout=Layout.PADDED)
    result, _ = compare(rollouts([elsewhere, elsewhere, older.teacher]), newer, older.teacher)
    assert (result.record.status, result.causes) == (Outcome.PASS, ())
    assert result.record.message == "the previous weights explain 1 of 3 rollouts: they are not the cause"
    assert result.record.evidence == {"at_previous": 1, "at_model": 0, "at_neither": 2}
