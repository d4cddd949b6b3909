from typing import Any

import pytest

from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.completion import Completion, FinishReason
from zerodrift.core.errors import InvalidPrompt, InvalidSampling, NonFinite
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.models.testbed_config import CONTEXT_LENGTH, EOS_ID, VOCAB_SIZE

PROMPT = Prompt((20, 30, 40, 50))


def complete(reference: ReferenceBackend, **options: Any) -> Completion:
    request = Request(PROMPT, SamplingParams(**{"seed": 5, "max_tokens": 16, **options}))
    (completion,) = reference.generate([request])[0].completions
    return completion


@pytest.fixture
def free(reference):
    """What comes when nothing stops it."""
    completion = complete(reference, ignore_eos=True)
    assert len(completion.token_ids) == 16
    assert completion.finish_reason is FinishReason.LENGTH
    return completion


def test_a_stop_token_ends_the_output_and_stays_in_it(reference, free):
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    stopped = complete(reference, ignore_eos=True, stop_token_ids=(stop,))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.logprobs == free.logprobs[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_the_output_with_the_token_that_completes_it(reference, free):
    decode = reference.tokenizer.decode
    text = decode(list(free.token_ids[:9]))
    # The end of a text, so that it spans tokens where one token is one letter.
    stop = text[-3:]
    first = next(end for end in range(1, 17) if stop in decode(list(free.token_ids[:end])))
    for stops in ((stop,), ("never in there \x00", stop)):
        stopped = complete(reference, ignore_eos=True, stop=stops)
        assert stopped.token_ids == free.token_ids[:first]
        assert stopped.finish_reason is FinishReason.STOP
        assert stop in (stopped.text or "")


def test_a_stop_that_never_comes_changes_nothing(reference, free):
    unused = next(token for token in range(VOCAB_SIZE) if token not in free.token_ids)
    same = complete(reference, ignore_eos=True, stop=("\x00\x01",), stop_token_ids=(unused,))
    assert (same.token_ids, same.logprobs) == (free.token_ids, free.logprobs)
    assert same.finish_reason is FinishReason.LENGTH


# With such a bias EOS is drawn wherever it may be.
EAGER_TO_END: dict[str, Any] = {"logit_bias": {EOS_ID: 100.0}}


@pytest.mark.parametrize(
    ("options", "count", "reason"),
    [
        ({}, 1, FinishReason.STOP),
        ({"ignore_eos": True}, 16, FinishReason.LENGTH),
        # A stop token that is named is not ignored.
        ({"ignore_eos": True, "stop_token_ids": (EOS_ID,)}, 1, FinishReason.STOP),
    ],
)
def test_the_end_of_sequence_ends_it_unless_it_is_ignored(reference, options, count, reason):
    ended = complete(reference, **EAGER_TO_END, **options)
    assert (ended.token_ids, ended.finish_reason) == ((EOS_ID,) * count, reason)
    assert ended.logprobs[0] > -1e-6


@pytest.mark.parametrize("least", [1, 5, 16])
def test_no_end_before_the_minimum(reference, least):
    held = complete(reference, **EAGER_TO_END, min_tokens=least)
    assert EOS_ID not in held.token_ids[:least]
    if least < 16:
        assert held.token_ids[least:] == (EOS_ID,)
        assert held.finish_reason is FinishReason.STOP
    else:
        assert held.finish_reason is FinishReason.LENGTH


def test_no_stop_token_before_the_minimum(reference, free):
    stop = free.token_ids[0]
    held = complete(reference, ignore_eos=True, stop_token_ids=(stop,), min_tokens=4)
    assert stop not in held.token_ids[:4]
    assert len(held.token_ids) > 4


def test_a_stop_string_within_the_minimum_waits_for_it(reference, free):
    stop = reference.tokenizer.decode(list(free.token_ids[:1]))
    assert complete(reference, ignore_eos=True, stop=(stop,)).token_ids == free.token_ids[:1]
    held = complete(reference, ignore_eos=True, stop=(stop,), min_tokens=4)
    assert held.token_ids == free.token_ids[:4]


def test_the_last_token_may_be_a_stop(reference, free):
    stop = free.token_ids[3]
    length = free.token_ids.index(stop) + 1
    last = complete(reference, ignore_eos=True, stop_token_ids=(stop,), max_tokens=length)
    assert last.finish_reason is FinishReason.STOP


def test_greedy_takes_the_likeliest_and_reports_temperature_one(reference):
    greedy = complete(reference, temperature=0, logprobs=2)
    assert greedy.token_ids == tuple(entries[0].token_id for entries in greedy.top_logprobs)
    assert any(value < -0.1 for value in greedy.logprobs)
    assert complete(reference, temperature=0, seed=99).token_ids == greedy.token_ids


def test_samples_of_one_request_differ_and_the_first_is_that_of_one(reference, free):
    request = Request(PROMPT, SamplingParams(seed=5, max_tokens=16, n=6, ignore_eos=True))
    samples = reference.generate([request])[0].completions
    assert [each.sample_index for each in samples] == list(range(6))
    assert {each.sampling.seed for each in samples} == {5}
    assert len({each.token_ids for each in samples}) == 6
    assert len({complete(reference, seed=seed, ignore_eos=True).token_ids for seed in range(8)}) == 8
    assert samples[0].token_ids == free.token_ids


def test_a_seed_that_was_drawn_is_reported_and_reproduces_the_sample(reference):
    request = Request(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True, n=2, temperature=1.5))
    first, second = reference.generate([request, request])
    seeds = [answer.completions[0].sampling.seed for answer in (first, second)]
    assert None not in seeds
    assert seeds[0] != seeds[1]
    assert first.completions[0].token_ids != second.completions[0].token_ids
    for answer in (first, second):
        again = reference.generate([Request(PROMPT, answer.completions[0].sampling)])[0]
        for one, other in zip(again.completions, answer.completions, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "each"),
    [({"logprobs": None}, 0), ({"logprobs": 0}, 0), ({"logprobs": 3}, 3), ({"logprobs": VOCAB_SIZE}, VOCAB_SIZE),
     ({"logprobs": 5, "top_k": 2}, 2)],
)  # fmt: skip
def test_as_many_alternatives_as_asked_for_and_not_excluded(reference, options, each):
    completion = complete(reference, max_tokens=2, **options)
    assert [len(entries) for entries in completion.top_logprobs] == ([each, each] if each else [])


OTHERS = tuple(token for token in range(VOCAB_SIZE) if token != EOS_ID)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ((VOCAB_SIZE,), {}, InvalidPrompt),
        ((9,) * (CONTEXT_LENGTH - 3), {"max_tokens": 4}, InvalidPrompt),
        ((9,), {"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidSampling),
        ((9,), {"stop_token_ids": (9999,), "min_tokens": 1}, InvalidSampling),
        ((9,), {"logprobs": VOCAB_SIZE + 1}, InvalidSampling),
        # All but EOS are stop tokens, and EOS may not come either.
        ((9,), {"stop_token_ids": OTHERS, "min_tokens": 1}, InvalidSampling),
    ],
    ids=["unknown id", "too long", "unknown bias", "unknown stop", "too many alternatives", "no token left"],
)
def test_what_the_model_cannot_do_is_refused(reference, prompt, options, error):
    fits = Request(Prompt((9,) * (CONTEXT_LENGTH - 2)), SamplingParams(max_tokens=2, ignore_eos=True))
    with pytest.raises(error):
        reference.generate([fits, Request(Prompt(prompt), SamplingParams(**options))])
    (completion,) = reference.generate([fits])[0].completions
    assert len(completion.token_ids) == 2


def test_corrupt_weights_are_refused_with_the_position():
    engine = ReferenceBackend("testbed:llama")
    engine.model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(NonFinite):
        complete(engine)
