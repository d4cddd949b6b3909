"""The probe against an engine that is played by the test: what a stream does to an answer, and what it is called."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from zerodrift.audit.probes.consistency import SelfConsistency
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.audit.probes.stream import stream
from zerodrift.backends.base import Capability
from zerodrift.core.completion import Answer, Completion, FinishReason, Problem
from zerodrift.core.errors import BadAnswer, EngineUnreachable
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.drift.gates import Gates
from zerodrift.records.verdict import Outcome

REQUESTS = [Request(Prompt((10 + row, 4, 5)), SamplingParams(max_tokens=4, seed=row)) for row in range(4)]
OUTPUT, TOLD = (7, 8, 9, 10), (-1.0, -2.0, -3.0, -4.0)


class Truth:
    def score(self, sequences: Any) -> list[list[float]]:
        raise AssertionError("what a stream changes is no question to the reference")


def run(engine: Any, gates: Gates) -> ProbeResult:
    return stream(SelfConsistency(engine, Truth(), REQUESTS, gates, "salt"))


@pytest.fixture
def engine(scripted, completion):
    """Answers OUTPUT and TOLD, less `noise` per call; the stream makes of it what `change` says."""

    def build(change=lambda _, each: each, *, noise=0.0, pieces=4, end=FinishReason.LENGTH, **options):
        def answer(request, number):
            told = tuple(value - noise * number for value in TOLD)
            return Answer((completion(request.prompt.token_ids, OUTPUT, told, finish_reason=end),))

        def pieced(request, answer):
            made = change(request, answer.completions[0])
            if isinstance(made, Problem):
                return Answer((), (made,), pieces)
            return Answer((made,), (), pieces)

        return scripted(answer, pieces=pieced, **options)

    return build


def changed(**fields: Any) -> Callable[[Request, Completion], Completion]:
    return lambda _, each: msgspec.structs.replace(each, **fields)


def cut(ids: tuple[int, ...], *, end: FinishReason = FinishReason.LENGTH) -> Any:
    """Other tokens, with as many numbers."""

    def change(_: Request, each: Completion) -> Completion:
        spans = tuple(msgspec.structs.replace(span, end=len(ids)) for span in each.versions)
        told = TOLD[: len(ids)] + (-1.0,) * (len(ids) - len(TOLD))
        return msgspec.structs.replace(each, token_ids=ids, logprobs=told, versions=spans, finish_reason=end)

    return change


def first_only(change: Any) -> Callable[[Request, Completion], Completion]:
    return lambda request, each: change(request, each) if request.sampling.seed == 0 else each


def test_a_healthy_engine_passes_and_says_how_many_pieces(engine, gates):
    played = engine()
    result = run(played, gates)
    assert (result.record.name, result.record.status, result.causes) == ("stream", Outcome.PASS, ())
    assert result.record.message == "16 tokens, every bit equal, in 16 pieces"
    assert result.record.evidence["pieces"] == 16
    assert played.batches == [1] * 8, "alone, and asked twice: nothing was doubted"
    assert len({request.prompt.cache_salt for request in played.asked}) == 8, "no cache is warm"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut(OUTPUT[:3]), "4 tokens whole and 3 streamed, both up to the length"),
        (cut((*OUTPUT, 10)), "4 tokens whole and 5 streamed"),
        (
            changed(finish_reason=FinishReason.STOP),
            "the same tokens end by length whole and by stop streamed",
        ),
        (changed(prompt_token_ids=(1, 2)), "they show a prompt of 2 tokens"),
        (lambda *_: Problem("value/completion", "4 tokens carry 2 logprobs"), "4 tokens carry 2 logprobs"),
    ],
    ids=["lost", "repeated", "finish reason", "prompt", "logprobs lost"],
)
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_what_no_rounding_explains_fails(engine, gates, change, says, noise):
    """Also where the engine does not repeat itself, and where one stream of four is broken."""
    result = run(engine(change, noise=noise), gates)
    assert result.record.status is Outcome.FAIL
    assert f"4 of 4 answers are broken where they are streamed: {says}" in result.record.message
    [cause] = result.causes
    assert (cause.cause, cause.gating, cause.explained) == ("semantic/streaming", True, 1.0)
    assert '"stream": false' in cause.fix
    some = run(engine(first_only(change), noise=noise), gates)
    assert some.record.status is Outcome.FAIL
    assert some.causes[0].explained == 0.25


def test_no_sample_at_all(engine, gates, scripted, completion):
    played = engine()
    played.stream = lambda requests: [Answer(())] * len(requests)
    result = run(played, gates)
    assert result.record.status is Outcome.FAIL
    assert "no sample came" in result.record.message


@pytest.mark.parametrize("end", [FinishReason.STOP, FinishReason.LENGTH])
def test_other_tokens_of_an_engine_that_repeats_itself_are_the_streams(engine, gates, end):
    ids = (7, 11, 12, 13) if end is FinishReason.LENGTH else (7, 8, 10)
    result = run(engine(cut(ids, end=end), end=end), gates)
    assert result.record.status is Outcome.FAIL
    assert result.record.message == "4 of 4 answers have other tokens where they are streamed"
    assert [cause.cause for cause in result.causes] == ["semantic/streaming"]


def test_rounding_that_parts_tokens_is_not(engine, gates):
    """One token in some hundreds falls otherwise where numbers differ in their last bits."""
    result = run(engine(first_only(cut((7, 8, 11, 12))), noise=1e-9), gates)
    assert result.record.status is Outcome.PASS
    assert result.record.evidence["parted"] == 1
    assert [(cause.cause, cause.gating) for cause in result.causes] == [("semantic/streaming", False)]


def test_numbers_that_do_not_repeat_themselves_whole_either_come_and_go(engine, gates):
    result = run(engine(changed(logprobs=(-1.0, -1.0, -2.0, -3.0)), noise=0.1), gates)
    assert result.status is Outcome.FAIL
    assert [cause.cause for cause in result.causes] == ["path/nondeterminism"]


@pytest.mark.parametrize("change", [cut((7, 8, 11, 12))])
def test_an_engine_that_does_not_repeat_itself_proves_nothing(engine, gates, change):
    result = run(engine(change, noise=0.1), gates)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert "does not repeat itself whole either" in result.record.message


@pytest.mark.parametrize("noise", [0.0, 1e-9])
@pytest.mark.parametrize(("gap", "gating"), [(1e-6, False), (1e-3, True)])
def test_other_numbers_are_listed_and_gate_above_the_gate(engine, gates, gap, gating, noise):
    played = engine(changed(logprobs=tuple(value - gap for value in TOLD)), noise=noise)
    result = run(played, gates)
    assert result.record.status is (Outcome.FAIL if gating else Outcome.PASS)
    assert [(cause.cause, cause.gating) for cause in result.causes] == [("semantic/streaming", gating)]
    assert "16 of 16 tokens differ" in result.record.message
    assert result.record.message.endswith("in 16 pieces")


def test_one_piece_is_no_stream(engine, gates):
    result = run(engine(pieces=1), gates)
    assert (result.record.status, result.record.vacuous) == (Outcome.INCONCLUSIVE, True)
    assert "in one piece" in result.record.message


@pytest.mark.parametrize("lacks", [Capability.SEED, Capability.STREAM])
def test_what_the_engine_cannot_do_is_not_judged(engine, gates, lacks):
    played = engine(capabilities=frozenset(Capability) - {lacks})
    result = run(played, gates)
    assert result.record.status is Outcome.INCONCLUSIVE
    assert not result.record.required
    assert result.record.message == f"the engine does not offer: {lacks}"
    assert played.asked == []


def raising(error: Exception) -> Callable[..., Any]:
    def fail(requests: Any) -> Any:
        raise error

    return fail


def test_a_stream_that_cannot_be_put_together_fails(engine, gates):
    played = engine()
    played.stream = raising(BadAnswer("/v1/completions went on with sample 0 after it had ended"))
    result = run(played, gates)
    assert result.record.status is Outcome.FAIL
    assert [cause.cause for cause in result.causes] == ["semantic/streaming"]
    assert "went on with sample 0" in result.record.message


def test_an_engine_that_dies_is_not_a_stream_that_lies(engine, gates):
    played = engine()
    played.stream = raising(EngineUnreachable("nobody there"))
    with pytest.raises(EngineUnreachable):
        run(played, gates)


def test_whole_answers_come_first(engine, gates):
    """Where an engine cannot be read at all, its streams are not to blame."""
    played = engine()
    played.answer = lambda request, number: Answer(())
    with pytest.raises(BadAnswer, match="no usable sample"):
        run(played, gates)
