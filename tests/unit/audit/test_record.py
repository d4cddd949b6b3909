"""Whose numbers a verdict shows."""

import pytest

from zerodrift.audit.decide import Decision
from zerodrift.audit.probes.result import answered
from zerodrift.audit.record import verdict_record
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.records.evidence import GapEvidence
from zerodrift.records.verdict import Outcome, Probe


@pytest.mark.parametrize(("guilty", "mean"), [("trainer", 0.22), ("engine", 4.6e-7), ("none", 4.6e-7)])
def test_the_figures_are_those_of_the_guilty_side(guilty: str, mean: float, llama: ReferenceBackend) -> None:
    engine, trainer = (GapEvidence(tokens=10, mean=each, max=each) for each in (4.6e-7, 0.22))
    results = (
        answered(Probe.PARITY, Outcome.PASS, "", engine, required=True),
        answered(Probe.TRAINER, Outcome.FAIL, "", trainer),
    )
    decision = Decision(Outcome.FAIL, guilty, "", (), results)
    record = verdict_record(
        decision, llama.fingerprint(), llama, Precision.FP32, None, None, reproduce="", smallest=""
    )
    assert record.metrics["mean"] == mean
