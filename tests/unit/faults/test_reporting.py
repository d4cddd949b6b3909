import math
from collections.abc import Callable, Sequence

import msgspec
import pytest

from zerodrift.backends.base import Backend
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Answer, Completion, FinishReason
from zerodrift.core.errors import CapabilityMissing, NonFinite
from zerodrift.core.request import Request
from zerodrift.faults.fault import Fault
from zerodrift.faults.registry import FAULTS, resolve
from zerodrift.faults.wrapper import FaultyBackend

Ask = Callable[..., list[Request]]
Tell = Callable[[Sequence[Answer]], list[Completion]]

NUMBERS = ("raw-logprobs", "off-by-one", "wrong-token")


@pytest.mark.parametrize(
    "number_fault", [f for f in FAULTS.values() if f.cause.endswith(NUMBERS)], ids=lambda fault: fault.spec
)
def test_faults_of_numbers_leave_the_tokens_alone(
    number_fault: Fault, llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    requests = ask(9, 30, n=2, logprobs=2)
    broken, honest = tell(number_fault.inject(llama).generate(requests)), tell(llama.generate(requests))
    assert any(a.logprobs != b.logprobs for a, b in zip(broken, honest, strict=True))
    for a, b in zip(broken, honest, strict=True):
        hidden = msgspec.structs.replace(a, logprobs=b.logprobs, top_logprobs=b.top_logprobs)
        assert hidden == b


def test_raw_logprobs_are_those_of_scoring(llama: ReferenceBackend, ask: Ask, tell: Tell) -> None:
    broken = tell(resolve("semantic/raw-logprobs").inject(llama).generate(ask(9, 20, logprobs=512)))
    for each in broken:
        (scores,) = llama.score([each.sequence])
        assert each.logprobs == pytest.approx(scores[len(each.prompt_token_ids) - 1 :], abs=1e-9)
        for token, value, entries in zip(each.token_ids, each.logprobs, each.top_logprobs, strict=True):
            own = [entry.logprob for entry in entries if entry.token_id == token]
            assert own == pytest.approx([value], abs=1e-9)
            assert sum(math.exp(entry.logprob) for entry in entries) == pytest.approx(1.0)
    (greedy,) = tell(resolve("semantic/raw-logprobs").inject(llama).generate(ask(9, temperature=0.0)))
    (honest,) = tell(llama.generate(ask(9, temperature=0.0)))
    assert greedy.logprobs == pytest.approx(honest.logprobs, abs=1e-9)


def test_raw_alternatives_of_penalised_ones_are_refused(llama: ReferenceBackend, ask: Ask) -> None:
    broken = resolve("semantic/raw-logprobs").inject(llama)
    with pytest.raises(CapabilityMissing):
        broken.generate(ask(9, presence_penalty=0.5, logprobs=1))
    assert broken.generate(ask(9, presence_penalty=0.5, logprobs=0))
    assert broken.generate([]) == []


def test_logprobs_move_by_one(llama: ReferenceBackend, ask: Ask, tell: Tell) -> None:
    requests = ask(9, max_tokens=8, logprobs=1)
    (honest,) = tell(llama.generate(requests))
    (left,) = tell(resolve("semantic/off-by-one:shifted-left").inject(llama).generate(requests))
    (right,) = tell(resolve("semantic/off-by-one:shifted-right").inject(llama).generate(requests))
    assert left.logprobs[:-1] == honest.logprobs[1:]
    assert right.logprobs[1:] == honest.logprobs[:-1]
    assert right.top_logprobs[1:] == honest.top_logprobs[:-1]


def test_the_likeliest_is_reported(llama: ReferenceBackend, ask: Ask, tell: Tell) -> None:
    (broken,) = tell(resolve("semantic/wrong-token").inject(llama).generate(ask(9, max_tokens=12)))
    (honest,) = tell(llama.generate(ask(9, max_tokens=12, logprobs=1)))
    assert broken.logprobs == tuple(entries[0].logprob for entries in honest.top_logprobs)
    assert broken.top_logprobs == ()
    assert broken.sampling.logprobs == 0


@pytest.mark.parametrize(("variant", "shown"), [("nan", "nan"), ("minus-9999", "-9999"), ("null", "null")])
def test_a_value_that_is_no_number_makes_a_problem(
    variant: str, shown: str, llama: ReferenceBackend, ask: Ask, tell: Tell
) -> None:
    requests = ask(9, 12, n=2)
    answers = resolve(f"semantic/nonfinite:{variant}").inject(llama).generate(requests)
    honest = llama.generate(requests)
    (problem,) = answers[0].problems
    assert problem.code == NonFinite.code
    assert shown in problem.message
    assert problem.message.startswith("sample 0: ")
    assert answers[0].completions == honest[0].completions[1:]
    assert answers[1] == honest[1]


def test_corruption_passes_over_requests_without_samples(llama: ReferenceBackend, ask: Ask) -> None:
    twice = resolve("semantic/nonfinite").inject(resolve("semantic/nonfinite").inject(llama))
    answers = twice.generate(ask(9, 12))
    assert [len(answer.problems) for answer in answers] == [1, 1]
    assert [len(answer.problems) for answer in twice.generate(ask(9))] == [1]


@pytest.fixture
def stopping(llama: ReferenceBackend, ask: Ask, tell: Tell) -> list[Request]:
    """The first two requests stop, one after some tokens and one at once; the third does not."""
    first, second, third = tell(llama.generate(ask(9, 12, 15)))
    stops = (first.token_ids[3:4], second.token_ids[:1], ())
    requests = [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, stop_token_ids=stop)
        )
        for request, stop in zip(ask(9, 12, 15), stops, strict=True)
    ]
    lengths = [len(each.token_ids) for each in tell(llama.generate(requests))]
    assert lengths == [first.token_ids.index(first.token_ids[3]) + 1, 1, 6]
    assert lengths[0] > 1
    assert third.finish_reason is FinishReason.LENGTH
    return requests


def test_the_stop_token_loses_its_logprob(
    stopping: list[Request], llama: ReferenceBackend, tell: Tell
) -> None:
    broken = tell(resolve("semantic/eos:no-logprob").inject(llama).generate(stopping))
    honest = tell(llama.generate(stopping))
    assert [each.token_ids for each in broken] == [each.token_ids for each in honest]
    assert [each.logprobs[-1] for each in broken[:2]] == [0.0, 0.0]
    assert broken[0].logprobs[:-1] == honest[0].logprobs[:-1]
    assert broken[2] == honest[2]


def test_the_stop_token_is_cut_off(stopping: list[Request], llama: ReferenceBackend, tell: Tell) -> None:
    broken = tell(resolve("semantic/eos:dropped").inject(llama).generate(stopping))
    honest = tell(llama.generate(stopping))
    assert broken[0].token_ids == honest[0].token_ids[:-1]
    assert broken[0].logprobs == honest[0].logprobs[:-1]
    assert broken[0].finish_reason is FinishReason.STOP
    assert broken[1:] == honest[1:]


@pytest.mark.parametrize(("variant", "owners"), [("swapped", (1, 0, 2)), ("rotated", (2, 0, 1))])
def test_outputs_go_to_other_requests(
    variant: str, owners: tuple[int, ...], llama: ReferenceBackend, ask: Ask
) -> None:
    requests = ask(9, 30, 12, n=2)
    requests[0] = msgspec.structs.replace(
        requests[0], sampling=msgspec.structs.replace(requests[0].sampling, n=1, max_tokens=3)
    )
    honest = llama.generate(requests)
    broken = resolve(f"semantic/misbound-output:{variant}").inject(llama).generate(requests)
    for request, answer, own, owner in zip(requests, broken, honest, owners, strict=True):
        taken = honest[owner].completions
        exchanged = min(len(own.completions), len(taken))
        assert len(answer.completions) == request.sampling.n
        for index, each in enumerate(answer.completions):
            source = taken[index] if index < exchanged else own.completions[index]
            assert (each.token_ids, each.logprobs, each.text) == (
                source.token_ids,
                source.logprobs,
                source.text,
            )
            assert each.prompt_token_ids == request.prompt.token_ids
            assert each.sampling == request.sampling


def test_one_request_alone_cannot_be_misbound(llama: ReferenceBackend, ask: Ask) -> None:
    for fault in (resolve("semantic/misbound-output:swapped"), resolve("semantic/misbound-output:rotated")):
        assert fault.inject(llama).generate(ask(9)) == llama.generate(ask(9))


def test_without_a_fault_nothing_changes(llama: ReferenceBackend, ask: Ask) -> None:
    plain: Backend = FaultyBackend(llama)
    assert plain.generate(ask(9)) == llama.generate(ask(9))
    assert plain.fingerprint() == llama.fingerprint()
