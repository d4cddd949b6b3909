from collections.abc import Callable, Sequence

import pytest

from zerodrift.backends.base import Capability
from zerodrift.backends.exact import ExactBackend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion
from zerodrift.core.errors import CapabilityMissing
from zerodrift.core.request import Request
from zerodrift.faults.after_update import Fleet
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.registry import FAULTS, inject_all, resolve

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]
STREAMED = [fault for fault in FAULTS.values() if Need.STREAM in fault.needs]
WRAPPING = [
    fault
    for fault in FAULTS.values()
    if fault.cause.startswith("semantic/")
    and not {Need.STREAM, Need.GENERATION_DEFAULTS, Need.TOKENIZER} & set(fault.needs)
]
of_streams = pytest.mark.parametrize("planted", STREAMED, ids=lambda fault: fault.spec)
of_requests_and_answers = pytest.mark.parametrize("planted", WRAPPING, ids=lambda fault: fault.spec)
"""They could forget what is streamed."""


@of_streams
def test_what_comes_whole_is_left_alone(planted: Fault, exact: ExactBackend, ask: Ask, tell: Tell) -> None:
    requests = ask(9, 12, logprobs=2, n=2)
    assert tell(planted.inject(exact).generate(requests)) == tell(exact.generate(requests))


@of_streams
def test_an_engine_that_does_not_stream_is_refused(planted: Fault, llama: ReferenceBackend) -> None:
    with pytest.raises(CapabilityMissing):
        planted.inject(llama)


def test_the_reference_says_that_it_does_not_stream(llama: ReferenceBackend, ask: Ask) -> None:
    for engine in (llama, resolve("semantic/seed").inject(llama)):
        assert Capability.STREAM not in engine.capabilities
        with pytest.raises(CapabilityMissing):
            engine.stream(ask(9))


@pytest.mark.parametrize("logprobs", [0, 2])
def test_a_lost_piece(exact: ExactBackend, ask: Ask, tell: Tell, logprobs: int) -> None:
    requests = ask(9, 12, logprobs=logprobs)
    broken = tell(resolve("semantic/streaming:chunk-lost").inject(exact).stream(requests))
    for lost, sound in zip(broken, tell(exact.stream(requests)), strict=True):
        assert lost.token_ids == sound.token_ids[:3] + sound.token_ids[4:]
        assert lost.logprobs == sound.logprobs[:3] + sound.logprobs[4:]
        assert lost.top_logprobs == sound.top_logprobs[:3] + sound.top_logprobs[4:]


def test_logprobs_one_late(exact: ExactBackend, ask: Ask, tell: Tell) -> None:
    requests = ask(9, 12, logprobs=2)
    broken = tell(resolve("semantic/streaming:logprobs-one-late").inject(exact).stream(requests))
    for late, sound in zip(broken, tell(exact.stream(requests)), strict=True):
        assert late.token_ids == sound.token_ids
        assert late.logprobs[1:] == sound.logprobs[:-1]
        assert late.top_logprobs[1:] == sound.top_logprobs[:-1]


def test_lost_logprobs_are_a_problem_of_the_sample(exact: ExactBackend, ask: Ask) -> None:
    (answer,) = resolve("semantic/streaming:logprobs-lost").inject(exact).stream(ask(9))
    assert answer.completions == ()
    assert [problem.code for problem in answer.problems] == ["value/completion"]
    assert "6 tokens carry 3 logprobs" in answer.problems[0].message
    assert answer.stream_deltas > 1


@of_streams
def test_one_token_has_nothing_to_lose(planted: Fault, exact: ExactBackend, ask: Ask) -> None:
    requests = ask(9, max_tokens=1)
    assert planted.inject(exact).stream(requests) == exact.stream(requests)


@of_requests_and_answers
def test_another_fault_is_streamed_as_it_comes_whole(
    planted: Fault, exact: ExactBackend, ask: Ask, tell: Tell
) -> None:
    """Never a stream without the fault, nor one that is a stream no more."""
    broken = planted.inject(exact)
    requests = ask(20, 9, temperature=1.0, n=2, logprobs=0)
    whole, streamed = broken.generate(requests), broken.stream(requests)
    assert [_kept(each) for each in tell(streamed)] == [_kept(each) for each in tell(whole)]
    assert [answer.problems for answer in streamed] == [answer.problems for answer in whole]
    assert all(answer.stream_deltas > 1 for answer in streamed)
    assert broken.generate(requests)[0].stream_deltas == 0, "and afterwards it answers whole again"


def _kept(each: Completion) -> tuple[object, ...]:
    return each.prompt_token_ids, each.token_ids, each.logprobs, each.finish_reason, each.sampling


def test_a_fault_inside_is_streamed(exact: ExactBackend, ask: Ask, tell: Tell) -> None:
    requests = ask(20, 9)
    damaged = resolve("path/rope").inject(exact)
    assert [_kept(each) for each in tell(damaged.stream(requests))] == [
        _kept(each) for each in tell(damaged.generate(requests))
    ]
    assert tell(damaged.stream(requests)) != tell(exact.stream(requests))


def test_two_faults_add_up_in_a_stream(exact: ExactBackend, ask: Ask, tell: Tell) -> None:
    requests = ask(20)
    both = inject_all(exact, ["semantic/streaming:chunk-lost", "semantic/off-by-one:shifted-left"])
    (lost,) = tell(both.stream(requests))
    (shifted,) = tell(resolve("semantic/off-by-one:shifted-left").inject(exact).stream(requests))
    assert lost.logprobs == shifted.logprobs[:3] + shifted.logprobs[4:]


def test_every_replica_streams(exact: ExactBackend, ask: Ask, tell: Tell) -> None:
    fleet = Fleet(exact)
    requests = ask(*range(5, 15))
    assert [_kept(each) for each in tell(fleet.stream(requests))] == [
        _kept(each) for each in tell(exact.stream(requests))
    ]
