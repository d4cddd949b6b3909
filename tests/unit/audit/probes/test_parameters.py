"""Parameters that an engine takes and does not honour, one at a time, beside the same engine as it should be."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from zerodrift.audit.measure import Measurement, Observed, measure
from zerodrift.audit.plan import parity_requests
from zerodrift.audit.probes.parameters import HOTTER, PARAMETERS, AskParameters, _honoured
from zerodrift.audit.prompts import generated
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, LogprobKind
from zerodrift.core.errors import EngineRefused
from zerodrift.core.request import Request, SamplingParams
from zerodrift.drift.honoured import Honoured, Value
from zerodrift.faults.registry import resolve
from zerodrift.faults.wrapper import FaultyBackend
from zerodrift.records.evidence import ParametersEvidence
from zerodrift.records.verdict import Outcome

BAND = 2.5e-5
Change = Callable[[SamplingParams], SamplingParams]


@pytest.fixture(scope="module")
def measurements(llama):
    prompts = generated(llama.tokenizer, llama.facts.vocab_size, 32, 12, 0)
    requests = parity_requests(prompts, SamplingParams(max_tokens=2), 12, 0)
    answers = llama.generate(requests)
    observed = [
        Observed(answer.completions[0], request.sampling)
        for request, answer in zip(requests, answers, strict=True)
    ]
    return measure(llama.teacher, observed, llama.facts.eos_token_ids)


class Otherwise(FaultyBackend):
    """Samples under other parameters; what it reports is theirs, or the model's own (`raw`)."""

    def __init__(self, inner: ReferenceBackend, change: Change, *, raw: bool = False) -> None:
        super().__init__(inner)
        self._engine = inner
        self._change, self._raw = change, raw

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        changed = [msgspec.structs.replace(each, sampling=self._change(each.sampling)) for each in requests]
        self._engine.kind = LogprobKind.RAW if self._raw else LogprobKind.PROCESSED
        try:
            return self._engine.generate(changed)
        finally:
            self._engine.kind = LogprobKind.PROCESSED


def without(name: str) -> Change:
    default = getattr(SamplingParams(), name)
    return lambda params: msgspec.structs.replace(params, **{name: default})


def lower_top_p(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, top_p=0.85 * params.top_p) if params.top_p < 1 else params


def asked(
    engine: Any, llama: ReferenceBackend, measurements: Sequence[Measurement], only: str = "", **sampling: Any
) -> Any:
    params = SamplingParams(max_tokens=8, **sampling)
    chosen = [each for each in PARAMETERS if only in ("", each.name)]
    result = AskParameters(engine, llama, params, measurements, BAND, 5, chosen).ask()
    assert isinstance(result.evidence, ParametersEvidence)
    return result


def test_a_sound_engine_honours_all(llama, measurements):
    result = asked(llama, llama, measurements)
    assert (result.status, result.causes, result.evidence.wrong) == (Outcome.PASS, (), "")
    assert result.evidence.asked.split(", ") == [each.name for each in PARAMETERS]
    (power,) = result.evidence.power
    assert power.seen_from is not None
    assert power.seen_from >= 0.7


@pytest.mark.parametrize("raw", [False, True])
def test_a_lowered_top_p_is_found_by_numbers_or_by_draws_alone(llama, measurements, raw):
    """Raw logprobs say nothing of it: then only which tokens come does."""
    engine = Otherwise(llama, lower_top_p, raw=raw)
    result = asked(engine, llama, measurements, "top_p")
    (cause,) = result.causes
    assert result.evidence.wrong == "top_p"
    assert (cause.cause, cause.gating, result.status) == ("semantic/sampling-bias", False, Outcome.PASS)
    used = asked(engine, llama, measurements, "top_p", top_p=0.9)
    assert (used.status, used.causes[0].gating) == (Outcome.FAIL, True)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("temperature", "semantic/sampling-bias"),
        ("top_k", "semantic/sampling-bias"),
        ("min_p", "semantic/sampling-bias"),
        ("repetition_penalty", "semantic/sampling-bias"),
        ("frequency_penalty", "semantic/sampling-bias"),
    ],
)
def test_a_parameter_that_is_dropped_is_named(llama, measurements, name, cause):
    result = asked(Otherwise(llama, without(name)), llama, measurements, name)
    assert result.evidence.wrong == name
    assert [(each.cause, each.gating) for each in result.causes] == [(cause, False)]


class Refusing(FaultyBackend):
    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        raise EngineRefused("400: min_p")


def test_what_the_engine_does_not_take_is_not_blamed(llama, measurements):
    result = AskParameters(Refusing(llama), llama, SamplingParams(), measurements, BAND, 0).ask()
    assert (result.status, result.required, result.causes) == (Outcome.INCONCLUSIVE, False, ())


def test_the_temperature_is_another_than_the_run_s(llama, measurements):
    own = AskParameters(llama, llama, SamplingParams(temperature=0.6), measurements, BAND, 0)
    assert own._parameters()[0] == HOTTER
    assert len(own._parameters()) == len(PARAMETERS)


def test_without_a_short_prompt_nothing_is_asked(llama):
    result = AskParameters(llama, llama, SamplingParams(), (), BAND, 0).ask()
    assert (result.status, result.required) == (Outcome.INCONCLUSIVE, False)


def test_what_would_not_be_seen_is_not_called_honoured():
    """As on the page of a sound engine, whose power section says the contrary."""
    seen = Honoured("top_p", 0.8, 256, (Value(1.0, -1.0, 100.0, 1.0),))
    blind = Honoured("presence_penalty", -2.0, 256, (Value(0.0, 0.0, 0.0, 0.0),))
    told = _honoured([seen, blind])
    assert told == "honoured as asked: top_p; taken, and another value would not be seen: presence_penalty"
    assert _honoured([seen]) == "honoured as asked: top_p"
    assert "honoured" not in _honoured([blind])


def test_a_planted_bias_cannot_be_asked_for_truncation_and_the_rest_is_asked(llama, measurements):
    """It ended the audit with a usage error, wherever the draws of the run had not shown it before."""
    engine = resolve("semantic/sampling-bias:hotter-1.2").inject(llama)
    result = AskParameters(engine, llama, SamplingParams(temperature=0.6), measurements, BAND, 5).ask()
    assert result.evidence.refused == "top_p, top_k, min_p"
    assert "temperature" in result.evidence.asked
