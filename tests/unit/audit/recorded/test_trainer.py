import numpy as np
import pytest

from zerodrift.audit.diagnose import Suspect
from zerodrift.audit.measure import Measurement, measure
from zerodrift.audit.probes.result import found
from zerodrift.audit.recorded.timeline import observer
from zerodrift.audit.recorded.trainer import _renamed, as_trainer, trainer_causes
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.request import SamplingParams
from zerodrift.core.task import Scorer
from zerodrift.drift.floor import Floor
from zerodrift.drift.gates import Gates
from zerodrift.faults.registry import resolve
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import CauseFound, FoundBy

GATES = Gates(mean=1e-5, p90=3e-5, k3=1e-6, veto=2.0)
FLOOR = Floor("float32", 8, 100, 1e-6, 3e-6, (-5.0, 0.0), (1e-6, 1e-6))


@pytest.fixture(scope="module")
def reference():
    return ReferenceBackend("testbed:llama")


def measured(reference: ReferenceBackend, trainer: Scorer, count: int) -> list[Measurement]:
    """Sequences with the numbers of `trainer`."""
    draw = np.random.default_rng(0)
    sequences = [tuple(draw.integers(4, 500, 22).tolist()) for _ in range(count)]
    rollouts = [
        RecordedRollout(
            source="d",
            line=number + 1,
            prompt=ids[:6],
            output=ids[6:],
            logprobs=(-1.0,) * 16,
            trainer_logprobs=tuple(numbers[5:]),
            sampling=SamplingParams(),
        )
        for number, (ids, numbers) in enumerate(zip(sequences, trainer.score(sequences), strict=True))
    ]
    items = measure(reference.teacher, [observer(())(rollout) for rollout in rollouts], ())
    return [as_trainer(rollout, item) for rollout, item in zip(rollouts, items, strict=True)]


def causes(reference: ReferenceBackend, items: list[Measurement]) -> tuple[CauseFound, ...]:
    suspect = Suspect(reference.model, reference.tokenizer, reference.facts)
    return trainer_causes(suspect, items, FLOOR, GATES, np.random.default_rng(0)).causes


def test_the_trainers_numbers_stand_in_the_engines_place(reference):
    for item in measured(reference, reference.teacher, 2):
        assert np.abs(item.delta).max() < 1e-9


def test_a_sequence_that_sees_the_one_before_it(reference):
    packed = resolve("trainer/packing").scorer(reference.model)
    (cause,) = causes(reference, measured(reference, packed, 3))
    assert cause.cause == "trainer/packing"
    assert cause.explained == pytest.approx(1, abs=1e-6)
    assert cause.found_by == "trainer"


def test_a_known_account_is_named_as_a_fault_of_the_trainer(reference):
    class Shifted:
        """Reads the score of the token before."""

        def score(self, sequences):
            return [[row[0], *row[:-1]] for row in reference.teacher.score(sequences)]

    (cause,) = causes(reference, measured(reference, Shifted(), 6))
    assert cause.cause == "semantic/off-by-one"
    assert cause.evidence.startswith("in the trainer's numbers: each logprob belongs to the token before it")
    assert cause.fix == "align the trainer's logits with its labels: those at position i-1 predict token i"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("semantic/raw-logprobs", "divide the trainer's logits"),
        ("semantic/temperature", "divide the trainer's logits"),
        ("path/head-precision", "load the trainer's weights in float32"),
        ("unexplained", "keep the run directory"),
    ],
)
def test_a_fix_is_one_for_a_trainer(name, fix):
    engine = found(name, "recorded", FoundBy.VALUE, "why", explained=0.7, gating=True)
    renamed = _renamed(engine)
    assert renamed.fix.startswith(fix)
    assert (renamed.found_by, renamed.explained, renamed.gating) == ("trainer", 0.7, True)
