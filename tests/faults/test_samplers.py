"""Samplers that draw other tokens than they report, each in one way, by an audit of the default size.

Every reported number is right: only which tokens come says anything. What the power lines promise to see is seen here in
an engine, beside the same engine that draws as it should.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from zerodrift.audit.floor import measure_floor, some_of
from zerodrift.audit.measure import Observed, measure, tabulate
from zerodrift.audit.plan import parity_requests
from zerodrift.audit.probes.parity import samples
from zerodrift.audit.prompts import generated
from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer
from zerodrift.core.request import Request, SamplingParams
from zerodrift.faults.rewriting import restated, rewrite
from zerodrift.faults.sampling import _logprobs_as_claimed
from zerodrift.faults.wrapper import FaultyBackend, clone, the_reference
from zerodrift.records.evidence import SamplingEvidence
from zerodrift.records.verdict import Outcome

MODEL = "testbed:llama"
Bend = Callable[[torch.Tensor, bool], torch.Tensor]
"""Changes rows of logits; says whether they are those of a first token."""
NEVER = -1e4
DEFAULT = SamplingParams(max_tokens=32)


class _Bent:
    """A model whose last row of logits is changed before a token is drawn from it."""

    def __init__(self, model: Any, bend: Bend) -> None:
        self.dtype, self.device, self.config = model.dtype, model.device, model.config
        self._model, self._bend = model, bend

    def __call__(self, ids_BL: torch.Tensor, **options: Any) -> Any:
        output = self._model(ids_BL, **options)
        rows_BV = output.logits[:, -1]
        output.logits = torch.cat(
            [output.logits[:, :-1], self._bend(rows_BV, options["past_key_values"] is None)[:, None]], dim=1
        )
        return output


class Redrawn(FaultyBackend):
    """Draws from bent logits, and reports what the requested parameters give these tokens."""

    def __init__(self, inner: Backend, bend: Bend) -> None:
        super().__init__(inner)
        self._bend = bend

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        sampler = the_reference(clone(self.inner))
        sampler.model = _Bent(sampler.model, self._bend)
        answers = sampler.generate(requests)
        claims = [
            (request.sampling, completion)
            for request, answer in zip(requests, answers, strict=True)
            for completion in answer.completions
        ]
        values = iter(_logprobs_as_claimed(self.inner, claims))
        return rewrite(requests, answers, lambda _, each: restated(each, next(values), 1.0))


def as_it_is(rows_BV: torch.Tensor, first: bool) -> torch.Tensor:
    return rows_BV


def never_ids(low: int, high: int) -> Bend:
    def bend(rows_BV: torch.Tensor, _: bool) -> torch.Tensor:
        rows_BV = rows_BV.clone()
        rows_BV[:, low:high] = NEVER
        return rows_BV

    return bend


def none_under(limit: float) -> Bend:
    return lambda rows_BV, _: torch.where(rows_BV.softmax(dim=-1) < limit, NEVER, rows_BV)


def first_taken(rows_BV: torch.Tensor, first: bool) -> torch.Tensor:
    if not first:
        return rows_BV
    return torch.where(rows_BV == rows_BV.amax(dim=-1, keepdim=True), rows_BV, NEVER)


def cooled(factor: float) -> Bend:
    return lambda rows_BV, _: rows_BV / factor


def stop_rarer(factor: float, stops: Sequence[int]) -> Bend:
    def bend(rows_BV: torch.Tensor, _: bool) -> torch.Tensor:
        rows_BV = rows_BV.clone()
        # Before the requested bias is added, which leaves the ratio alone.
        rows_BV[:, list(stops)] += torch.tensor(factor).log()
        return rows_BV

    return bend


BENT: dict[str, Bend] = {
    "ids 470 to 508 never": never_ids(470, 509),
    "ids 96 to 143 never": never_ids(96, 144),
    "none under 0.004": none_under(0.004),
    "first token taken": first_taken,
    "temperature times 0.83": cooled(0.83),
    "temperature times 1.2": cooled(1.2),
}


@pytest.fixture(scope="module")
def engine():
    return ReferenceBackend(MODEL, dtype="float32")


@pytest.fixture
def drawn(engine, reference):
    """The part of an audit that judges samples, with its default numbers."""
    judge = reference(MODEL)

    def run(bend, trials=64, sampling=DEFAULT):
        prompts = generated(judge.tokenizer, judge.facts.vocab_size, 64, 32, 0)
        requests = parity_requests(prompts, sampling, trials, 0)
        answers = Redrawn(engine, bend).generate(requests)
        observed = [
            Observed(completion, request.sampling)
            for request, answer in zip(requests, answers, strict=True)
            for completion in answer.completions
        ]
        floor = measure_floor(judge.model, [item.passage for item in some_of(observed[:8])], "float32")
        measured = measure(judge.teacher, observed, judge.facts.eos_token_ids)
        found = samples(tabulate(measured, floor), greedy=False)
        assert isinstance(found.evidence, SamplingEvidence)
        return found.status, found.evidence

    return run


@pytest.mark.parametrize("name", BENT)
def test_a_sampler_that_draws_otherwise_is_seen(drawn, name):
    outcome, _ = drawn(BENT[name])
    assert outcome is Outcome.FAIL


def test_one_that_draws_as_it_should_is_not(drawn):
    outcome, evidence = drawn(as_it_is)
    assert outcome is Outcome.PASS
    assert evidence.p_counts > 0.01
    assert {line.name for line in evidence.power} >= {"first token taken", "stop token too rare"}


def test_a_stop_token_is_seen_from_where_the_line_says(drawn, engine):
    """Made likelier by the request itself, so that there are ends to count."""
    stops = engine.facts.eos_token_ids
    often = SamplingParams(max_tokens=32, logit_bias=dict.fromkeys(stops, 6.0))
    healthy, evidence = drawn(as_it_is, 192, often)
    assert healthy is Outcome.PASS
    (line,) = [line for line in evidence.power if line.name == "stop token too rare"]
    assert line.seen_from is not None
    assert 0.15 < line.seen_from < 0.8
    assert drawn(stop_rarer(0.8 * line.seen_from, stops), 192, often)[0] is Outcome.FAIL


def test_the_name_is_that_of_the_draws(matrix, engine, reference, tmp_path):
    size = ValidationConfig(num_prompts=24, equivalence_trials=64, max_tokens=32)
    bent = Redrawn(engine, BENT["ids 470 to 508 never"])
    record = matrix.judge(bent, reference(MODEL), tmp_path, msgspec.structs.replace(size, seed=3))
    assert record.verdict is Outcome.FAIL
    gating = [cause.cause for cause in record.causes if cause.gating]
    assert gating == ["semantic/sampling-bias"]
    assert any(line.name == "ids never drawn" for line in record.power)
