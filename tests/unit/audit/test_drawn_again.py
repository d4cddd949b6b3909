"""Samples that chance explains badly: the audit draws more by itself before it says anything."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from zerodrift.audit import run
from zerodrift.audit.run import Audit
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer
from zerodrift.core.errors import EngineUnreachable
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import Outcome, Probe

TRIALS, TOKENS = 24, 16


class LaterDraws(FaultyBackend):
    """What is drawn behind the plan, which is one call, comes from `later`; seeds of all are kept."""

    def __init__(self, inner: ReferenceBackend, later: Callable[[Request], Request]) -> None:
        super().__init__(inner)
        self._later, self.seeds = later, list[int | None]()

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        behind = bool(self.seeds)
        self.seeds += [each.sampling.seed for each in requests]
        return super().generate([self._later(each) for each in requests] if behind else requests)


def as_asked(request: Request) -> Request:
    return request


def colder(request: Request) -> Request:
    return Request(request.prompt, msgspec.structs.replace(request.sampling, temperature=0.35))


def gone(request: Request) -> Request:
    raise EngineUnreachable("nothing answers any more")


@pytest.mark.parametrize(
    ("later", "settled"),
    [(as_asked, Outcome.PASS), (colder, Outcome.FAIL), (gone, Outcome.INCONCLUSIVE)],
)
def test_the_audit_draws_more_by_itself(later, settled, llama, tmp_path, monkeypatch):
    engine = LaterDraws(llama, later)
    audit = Audit(
        engine=engine,
        reference=llama,
        prompts=[Prompt((0, 10 + number)) for number in range(8)],
        sampling=SamplingParams(temperature=0.7, max_tokens=TOKENS),
        validation=ValidationConfig(num_prompts=8, equivalence_trials=TRIALS, max_tokens=TOKENS),
        precision=Precision.FP32,
        directory=tmp_path,
    )
    real, told = run.samples, []

    def doubtful_at_first(*given, **options):
        result = real(*given, **options)
        told.append(result)
        doubt = msgspec.structs.replace(result, status=Outcome.INCONCLUSIVE, message="odd")
        return doubt if len(told) == 1 else result

    monkeypatch.setattr(run, "samples", doubtful_at_first)
    audited = audit.run()
    (judged,) = [each for each in audited.record.probes if each.name == Probe.SAMPLING]
    assert judged.status is settled
    plan = len(audit.requests())
    asked = engine.seeds[: plan * (1 if later is gone else 3)]
    assert len(set(asked)) == len(asked), "samples of their own"
