"""Faults of requests and answers: an honest engine that is asked otherwise gives the same, and nothing else differs."""

import math
from typing import Any

import msgspec
import pytest
from tests.unit.faults.support import Elsewhere, ask, by, continuing, outputs, same, told

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import entries
from zerodrift.core.completion import Completion, FinishReason
from zerodrift.core.errors import CapabilityMissing, NonFinite
from zerodrift.core.request import Prompt
from zerodrift.faults.after_update import Fleet
from zerodrift.faults.fault import Need
from zerodrift.faults.registry import FAULTS, resolve
from zerodrift.faults.rewriting import with_prompt
from zerodrift.faults.sampling import _frequent_tokens
from zerodrift.sampler.processing import histories, processed_logprobs

Ids = tuple[int, ...]
CHAT = [{"role": "user", "content": "How far is it?"}]
BIASED = {
    "semantic/sampling-bias:top-p-0.95": {"top_p": 0.95},
    "semantic/sampling-bias": {"temperature": 0.8 * 1.2},
}
"""Right numbers beside tokens of another distribution."""


# Other parameters.


@pytest.mark.parametrize("spec", BIASED)
def test_right_numbers_for_tokens_of_another_distribution(spec, llama):
    """Held to the code that the fault must not use, under every parameter that can be requested."""
    asked: dict[str, Any] = {"n": 2, "max_tokens": 12, "logprobs": 3}
    broken = by(spec, llama, ask(9, 30, **asked))
    sampled = told(llama.generate(ask(9, 30, **asked, **BIASED[spec])))
    assert [each.token_ids for each in broken] == [each.token_ids for each in sampled]
    assert all(a.logprobs != b.logprobs for a, b in zip(broken, sampled, strict=True))
    many = {"min_tokens": 6, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {9: 1.0}}
    for each in broken + by(spec, llama, ask(9, 30, **asked, **many, frequency_penalty=0.2)):
        past = histories(each.prompt_token_ids, each.token_ids)
        (logits_TV,) = llama.teacher.logits([each.sequence], [len(each.prompt_token_ids)])
        right_TV = processed_logprobs(logits_TV, each.sampling, past, llama.facts.eos_token_ids)
        assert each.logprobs == pytest.approx(entries(right_TV, each.token_ids).tolist(), abs=1e-9)
    for each in broken:
        (logits_TV,) = llama.teacher.logits([each.sequence], [len(each.prompt_token_ids)])
        for other in each.top_logprobs[0]:
            right = entries(logits_TV[:1] / 0.8, [other.token_id]).item()
            assert other.logprob == pytest.approx(right, abs=1e-9)


def test_right_numbers_come_from_scoring_where_the_engine_is_a_stranger(llama):
    fault, plain = resolve("semantic/sampling-bias"), ask(9, 12, temperature=1.0)
    broken = fault.inject(Elsewhere(llama))
    assert same(told(broken.generate(plain)), by(fault.spec, llama, plain))
    for asked in ({"temperature": 0.8}, {"temperature": 1.0, "presence_penalty": 0.1}):
        with pytest.raises(CapabilityMissing):
            broken.generate(ask(9, **asked))
    with pytest.raises(CapabilityMissing):
        fault.inject(llama).generate(ask(9, top_p=0.9))
    assert fault.inject(llama).generate([]) == []


def test_frequent_tokens_are_biased(llama):
    chosen = _frequent_tokens(llama)
    assert len(set(chosen)) == 5
    assert not set(chosen) & set(llama.facts.eos_token_ids)
    broken = by("semantic/logit-bias", llama, ask(9, 30, logit_bias={9: 1.0}))
    honest = told(llama.generate(ask(9, 30, logit_bias={9: 1.0, **dict.fromkeys(chosen, 2.0)})))
    assert outputs(broken) == outputs(honest)


def test_defaults_of_the_model_fill_in_what_a_request_leaves_out(with_defaults):
    for asked, really in (
        ({}, {"top_p": 0.9, "repetition_penalty": 1.05}),
        ({"top_p": 0.5, "repetition_penalty": 1.3}, {"top_p": 0.5, "repetition_penalty": 1.3}),
        # A greedy engine has nothing to cut off, whatever the defaults say.
        ({"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.05}),
    ):
        broken = by("semantic/generation-config", with_defaults, ask(30, max_tokens=12, **asked))
        assert outputs(broken) == outputs(told(with_defaults.generate(ask(30, max_tokens=12, **really))))


@pytest.mark.parametrize("seed", [11, None])
def test_samples_share_their_noise(seed, llama):
    (answer,) = resolve("semantic/seed").inject(llama).generate(ask(9, n=3, seed=seed))
    assert [each.sample_index for each in answer.completions] == [0, 1, 2]
    assert len({each.token_ids for each in answer.completions}) == 1
    assert len({each.sampling.seed for each in answer.completions} - {None}) == 1
    assert len({each.token_ids for each in told(llama.generate(ask(9, n=3)))}) == 3


# Other prompts.


def through_text(engine: ReferenceBackend, ids: Ids) -> Ids:
    return tuple(engine.tokenizer(engine.tokenizer.decode(ids), add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("spec", "really"),
    [
        ("semantic/bos:doubled", lambda engine, ids: (0, *ids)),
        ("semantic/bos:missing", lambda engine, ids: ids[1:]),
        ("semantic/bos:doubled-visible", lambda engine, ids: (0, *ids)),
        ("semantic/template:newline-lost", lambda engine, ids: ids[:-1]),
        ("semantic/template:newline-lost-visible", lambda engine, ids: ids[:-1]),
        ("semantic/retokenised:prompt", through_text),
        ("semantic/retokenised:prompt-visible", through_text),
    ],
)
def test_another_prompt_is_continued(spec, really, llama):
    (request,) = ask(30, n=2)
    ids = request.prompt.token_ids
    assert really(llama, ids) != ids
    fault, visible = resolve(spec), spec.endswith("visible")
    honest = told(llama.generate(continuing(request, Prompt(really(llama, ids)))))
    for a, b in zip(told(fault.inject(llama).generate([request])), honest, strict=True):
        assert outputs([a]) == outputs([b])
        assert a.prompt_token_ids == (b.prompt_token_ids if visible else ids)
        assert a.lineage[-1].end == len(a.prompt_token_ids) + len(a.token_ids) - 1
    chat = llama.render_chat(CHAT)
    assert fault.inject(llama).render_chat(CHAT) == (really(llama, chat) if visible else chat)


def test_what_is_not_there_cannot_be_taken(llama):
    for spec, ids in (
        ("semantic/bos:missing", (5, 6, 7)),
        ("semantic/bos:missing", (0,)),
        ("semantic/template:newline-lost", (7,)),
    ):
        plain = continuing(*ask(9), Prompt(ids))
        assert resolve(spec).inject(llama).generate(plain) == llama.generate(plain)


def test_a_stranger_retokenises_the_text_it_is_given(llama):
    broken = resolve("semantic/retokenised:prompt-visible").inject(Elsewhere(llama))
    with pytest.raises(CapabilityMissing):
        broken.generate(ask(9))
    text = "water, bread"
    (completion,) = told(broken.generate(continuing(*ask(9), Prompt((5, 6), text=text))))
    assert completion.prompt_token_ids == llama.tokenize(text)


def test_prompt_logprobs_of_a_denied_prompt_are_left_out(llama):
    (completion,) = told(llama.generate(ask(3)))
    scored = msgspec.structs.replace(completion, prompt_logprobs=(None, -1.0, -2.0), lineage=())
    denied = with_prompt(scored, (7, 8))
    assert (denied.prompt_logprobs, denied.lineage) == ((), ())
    assert with_prompt(scored, completion.prompt_token_ids) is scored


# Other reports.


def test_raw_logprobs_are_those_of_scoring(llama):
    for each in by("semantic/raw-logprobs", llama, ask(9, 20, logprobs=512)):
        (scores,) = llama.score([each.sequence])
        assert each.logprobs == pytest.approx(scores[len(each.prompt_token_ids) - 1 :], abs=1e-9)
        for token, value, table in zip(each.token_ids, each.logprobs, each.top_logprobs, strict=True):
            own = [entry.logprob for entry in table if entry.token_id == token]
            assert own == pytest.approx([value], abs=1e-9)
            assert sum(math.exp(entry.logprob) for entry in table) == pytest.approx(1.0)
    greedy = ask(9, temperature=0.0)
    assert same(by("semantic/raw-logprobs", llama, greedy), told(llama.generate(greedy)))
    broken = resolve("semantic/raw-logprobs").inject(llama)
    with pytest.raises(CapabilityMissing):
        broken.generate(ask(9, presence_penalty=0.5, logprobs=1))
    assert broken.generate(ask(9, presence_penalty=0.5, logprobs=0))
    assert broken.generate([]) == []


@pytest.mark.parametrize(("variant", "shown"), [("nan", "nan"), ("minus-9999", "-9999"), ("null", "null")])
def test_a_value_that_is_no_number_makes_a_problem(variant, shown, llama):
    requests = ask(9, 12, n=2)
    answers = resolve(f"semantic/nonfinite:{variant}").inject(llama).generate(requests)
    honest = llama.generate(requests)
    (problem,) = answers[0].problems
    assert problem.code == NonFinite.code
    assert shown in problem.message
    assert answers[0].completions == honest[0].completions[1:]
    assert answers[1] == honest[1]
    # Where the first request has no sample left, the next one's is corrupt.
    fault = resolve(f"semantic/nonfinite:{variant}")
    twice = fault.inject(fault.inject(llama))
    assert [len(answer.problems) for answer in twice.generate(ask(9, 12))] == [1, 1]


def test_the_stop_token_loses_its_logprob_or_itself(llama):
    """The first request stops after some tokens, the second at once, the third does not."""
    first, second, _ = told(llama.generate(ask(9, 12, 15)))
    requests = [
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, stop_token_ids=stop)
        )
        for request, stop in zip(
            ask(9, 12, 15), (first.token_ids[3:4], second.token_ids[:1], ()), strict=True
        )
    ]
    honest = told(llama.generate(requests))
    assert [each.finish_reason for each in honest] == [FinishReason.STOP] * 2 + [FinishReason.LENGTH]
    assert len(honest[0].token_ids) > len(honest[1].token_ids) == 1
    certain = by("semantic/eos:no-logprob", llama, requests)
    assert [each.logprobs for each in certain[:2]] == [(*honest[0].logprobs[:-1], 0.0), (0.0,)]
    assert certain[2] == honest[2]
    dropped = by("semantic/eos:dropped", llama, requests)
    assert (dropped[0].token_ids, dropped[0].logprobs) == (honest[0].token_ids[:-1], honest[0].logprobs[:-1])
    assert dropped[0].finish_reason is FinishReason.STOP
    assert dropped[1:] == honest[1:]


@pytest.mark.parametrize(("variant", "owners"), [("swapped", (1, 0, 2)), ("rotated", (2, 0, 1))])
def test_outputs_go_to_other_requests(variant, owners, llama):
    requests = [*ask(9, max_tokens=3), *ask(9, 30, 12, n=2)[1:]]
    honest = llama.generate(requests)
    broken = resolve(f"semantic/misbound-output:{variant}").inject(llama)
    for request, answer, own, owner in zip(requests, broken.generate(requests), honest, owners, strict=True):
        # One for one, as many as both have.
        taken = honest[owner].completions[: request.sampling.n]
        assert outputs(answer.completions) == outputs((*taken, *own.completions[len(taken) :]))
        assert {each.prompt_token_ids for each in answer.completions} == {request.prompt.token_ids}
    assert broken.generate(ask(9)) == llama.generate(ask(9)), "one request alone cannot be misbound"


# Streams.


def kept(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(each.prompt_token_ids, each.sampling, *outputs([each])) for each in completions]


@pytest.mark.parametrize("spec", [spec for spec, fault in FAULTS.items() if Need.STREAM in fault.needs])
def test_a_fault_of_streams_leaves_the_rest_alone(spec, exact, llama):
    broken = resolve(spec).inject(exact)
    whole, short = ask(9, 12, logprobs=2, n=2), ask(9, max_tokens=1)
    assert told(broken.generate(whole)) == told(exact.generate(whole))
    assert broken.stream(short) == exact.stream(short), "one token has nothing to lose"
    with pytest.raises(CapabilityMissing):
        resolve(spec).inject(llama)


@pytest.mark.parametrize("logprobs", [0, 2])
def test_pieces_are_lost_or_late(exact, logprobs):
    requests = ask(9, logprobs=logprobs)
    (sound,) = told(exact.stream(requests))
    (lost,) = told(resolve("semantic/streaming:chunk-lost").inject(exact).stream(requests))
    (late,) = told(resolve("semantic/streaming:logprobs-one-late").inject(exact).stream(requests))
    for name in ("token_ids", "logprobs", "top_logprobs"):
        values = getattr(sound, name)
        assert getattr(lost, name) == values[:3] + values[4:]
        assert getattr(late, name)[1:] == (values[1:] if name == "token_ids" else values[:-1])
    (answer,) = resolve("semantic/streaming:logprobs-lost").inject(exact).stream(requests)
    assert [problem.code for problem in answer.problems] == ["value/completion"]
    assert (answer.completions, answer.stream_deltas > 1) == ((), True)


@pytest.mark.parametrize(
    "spec",
    [
        "path/rope:theta-doubled",
        *(
            spec
            for spec, fault in FAULTS.items()
            if fault.cause.startswith("semantic/")
            and not {Need.STREAM, Need.GENERATION_DEFAULTS, Need.TOKENIZER} & set(fault.needs)
        ),
    ],
)
def test_another_fault_is_streamed_as_it_comes_whole(spec, exact):
    """Never a stream without the fault, nor one that is a stream no more."""
    broken = resolve(spec).inject(exact)
    requests = ask(20, 9, temperature=1.0, n=2)
    whole, streamed = broken.generate(requests), broken.stream(requests)
    assert kept(told(streamed)) == kept(told(whole))
    assert [answer.problems for answer in streamed] == [answer.problems for answer in whole]
    assert all(answer.stream_deltas > 1 for answer in streamed)
    assert broken.generate(requests)[0].stream_deltas == 0, "and afterwards it answers whole again"


def test_faults_add_up_in_a_stream_and_every_replica_streams(exact, llama):
    moved = resolve("semantic/off-by-one:shifted-left").inject(exact)
    (lost,) = told(resolve("semantic/streaming:chunk-lost").inject(moved).stream(ask(20)))
    (shifted,) = told(moved.stream(ask(20)))
    assert lost.logprobs == shifted.logprobs[:3] + shifted.logprobs[4:]
    requests = ask(*range(5, 15))
    assert kept(told(Fleet(exact).stream(requests))) == kept(told(exact.stream(requests)))
    with pytest.raises(CapabilityMissing):
        resolve("semantic/seed").inject(llama).stream(ask(9))
