"""Whole audits of engines whose fault comes and goes, beside the same fault when it stays and an engine without any."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch

from zerodrift.audit.run import Audit, Audited
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.config.precision import Precision
from zerodrift.config.validation import ValidationConfig
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.verdict import Outcome, ProbeRecord

NAME = "path/nondeterminism"
TRIALS, TOKENS = 80, 16
Values = Callable[["ComesAndGoes", Completion, int], float]


class ComesAndGoes(FaultyBackend):
    """Reports `wrong` where the dice say so: of a whole request, or of a token."""

    def __init__(
        self,
        inner: ReferenceBackend,
        wrong: Values,
        *,
        requests: float = 1.0,
        tokens: float = 1.0,
        since: int = 0,
        until: int = 10**9,
        seeded: bool = False,
    ) -> None:
        super().__init__(inner)
        self.model = inner.model
        self._wrong, self._requests, self._tokens, self._since, self._until = (
            wrong,
            requests,
            tokens,
            since,
            until,
        )
        self.dice, self._seeded, self._asked = np.random.default_rng(5), seeded, 0
        self.last: Completion | None = None

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return [
            self._answer(request, answer)
            for request, answer in zip(requests, super().generate(requests), strict=True)
        ]

    def _answer(self, request: Request, answer: Answer) -> Answer:
        self._asked += 1
        dice = np.random.default_rng(request.sampling.seed) if self._seeded else self.dice
        told = [self._told(dice, each) for each in answer.completions]
        self.last = answer.completions[0]
        return Answer(tuple(told), answer.problems, answer.stream_deltas)

    def _told(self, dice: np.random.Generator, completion: Completion) -> Completion:
        hit = dice.random() < self._requests and self._since <= self._asked < self._until
        values = [
            self._wrong(self, completion, place) if hit and dice.random() < self._tokens else value
            for place, value in enumerate(completion.logprobs)
        ]
        return msgspec.structs.replace(completion, logprobs=tuple(values))


def another_entry(engine: ComesAndGoes, completion: Completion, place: int) -> float:
    """The logprob of the second or third likeliest token in place of the sampled one's."""
    ids = completion.prompt_token_ids + completion.token_ids[:place]
    with torch.no_grad():
        row_V = engine.model(torch.tensor([ids])).logits[0, -1]
    told_V = torch.log_softmax(row_V / completion.sampling.temperature, -1)
    best = [int(token) for token in told_V.topk(4).indices if int(token) != completion.token_ids[place]]
    return float(told_V[best[1]])


def stale(engine: ComesAndGoes, completion: Completion, place: int) -> float:
    return completion.logprobs[place - 1]


def neighbour(engine: ComesAndGoes, completion: Completion, place: int) -> float:
    beside = engine.last
    return -1.75 if beside is None or place >= len(beside.logprobs) else beside.logprobs[place]


def shifted(engine: ComesAndGoes, completion: Completion, place: int) -> float:
    return completion.logprobs[place] - 0.625


@pytest.fixture
def audited(llama, tmp_path):
    def run(engine, precision=Precision.FP32):
        rng = np.random.default_rng(11)
        prompts = [Prompt(tuple(rng.integers(4, 500, 3 + number % 9).tolist())) for number in range(48)]
        return Audit(
            engine=engine,
            reference=llama,
            prompts=prompts,
            sampling=SamplingParams(temperature=0.8, max_tokens=TOKENS),
            validation=ValidationConfig(num_prompts=48, equivalence_trials=TRIALS, max_tokens=TOKENS),
            precision=precision,
            directory=tmp_path,
        ).run()

    return run


def returned(audited: Audited) -> ProbeRecord:
    (record,) = [record for record in audited.record.probes if record.name == "return"]
    return record


def gating(audited: Audited) -> list[str]:
    return [cause.cause for cause in audited.record.causes if cause.gating]


@pytest.mark.parametrize(
    ("wrong", "field", "rate"),
    [
        (another_entry, "another_entry", {"requests": 1 / 20}),
        pytest.param(another_entry, "another_entry", {"tokens": 1 / 50}, marks=pytest.mark.long),
        pytest.param(stale, "another_position", {"tokens": 1 / 50}, marks=pytest.mark.long),
        pytest.param(neighbour, "another_request", {"requests": 1 / 20}, marks=pytest.mark.long),
    ],
    ids=["another entry", "another entry of a token", "stale value", "neighbour's value"],
)
def test_what_comes_and_goes_is_named_so_and_says_whose_values_it_reports(audited, llama, wrong, field, rate):
    verdict = audited(ComesAndGoes(llama, wrong, **rate))
    assert verdict.record.verdict is Outcome.FAIL
    assert gating(verdict) == [NAME]
    evidence = returned(verdict).evidence
    assert evidence[field] >= 0.8 * evidence["looked_at"]
    assert not {"another_entry", "another_position", "another_request"} & evidence.keys() - {field}
    assert evidence["gone"] >= 0.5 * evidence["asked_again"]
    assert "since_request" not in evidence


@pytest.mark.parametrize("since", [60, pytest.param(83, marks=pytest.mark.long)])
def test_what_begins_in_the_middle_is_named_so(audited, llama, since):
    """Among the requests of the audit, and behind the last of them."""
    verdict = audited(ComesAndGoes(llama, shifted, since=since))
    assert verdict.record.verdict is Outcome.FAIL
    assert gating(verdict) == [NAME]
    assert returned(verdict).evidence["came"] > 0


@pytest.mark.long
def test_what_has_ended_again_says_when_it_was(audited, llama):
    verdict = audited(ComesAndGoes(llama, shifted, since=60, until=71))
    assert gating(verdict) == [NAME]
    evidence = returned(verdict).evidence
    assert evidence["since_request"] == 59
    assert evidence["gone"] == evidence["asked_again"] > 0


@pytest.mark.long
@pytest.mark.parametrize("rate", [{"tokens": 1 / 50}])
def test_the_same_fault_when_it_stays_does_not_come_and_go(audited, llama, rate):
    """As rare, and the same for the same request: whatever it is, it is no matter of time."""
    verdict = audited(ComesAndGoes(llama, another_entry, seeded=True, **rate))
    assert verdict.record.verdict is Outcome.FAIL
    assert NAME not in gating(verdict)
    evidence = returned(verdict).evidence
    assert evidence["asked_again"] > 0
    assert "gone" not in evidence


def test_an_engine_without_a_fault_answers_as_before(audited, llama):
    verdict = audited(llama)
    assert verdict.record.verdict is Outcome.PASS
    assert returned(verdict).status is Outcome.PASS
    assert gating(verdict) == []


def rounded_anew(engine: ComesAndGoes, completion: Completion, place: int) -> float:
    """Another order of sums at every call, with the tails of bf16."""
    return min(0.0, completion.logprobs[place] + 0.02 * float(engine.dice.standard_t(3)))


def test_an_engine_that_rounds_anew_at_every_call_is_healthy_in_bf16(audited, llama):
    verdict = audited(ComesAndGoes(llama, rounded_anew), Precision.BF16)
    assert verdict.record.verdict is Outcome.PASS
    assert returned(verdict).evidence["differing"] > 0


@pytest.mark.parametrize(
    ("where", "name"),
    [("model", "unexplained"), pytest.param("report", "semantic/temperature", marks=pytest.mark.long)],
)
def test_logits_that_are_scaled_inside_the_model_are_no_temperature(audited, llama, where, name):
    """Prompt scores carry none, and fail where the model itself is wrong."""
    scaled = ReferenceBackend("testbed:llama", dtype="float64")
    scaled.model.lm_head.register_forward_hook(lambda module, given, logits: 1.15 * logits)
    if where == "report":
        scaled.score = llama.score
    verdict = audited(scaled)
    assert gating(verdict) == [name]
    hints = [cause.cause for cause in verdict.record.causes if not cause.gating]
    assert ("semantic/temperature" in hints) is (where == "model")
