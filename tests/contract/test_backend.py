"""One suite over every backend: reference, exact and the peers always, real engines with `make test-engines`.

The promises are functions in promises.py; test_promises.py shows each of them failing on an engine that breaks it.
What is particular to one engine, or to one release of it, is in that engine's own file.
"""

import opened
import promises
import pytest

from zerodrift.backends.base import Capability
from zerodrift.core.request import Prompt, Request, SamplingParams


@pytest.fixture(scope="module", autouse=True)
def servers_end():
    """With the tests of this file, which share them."""
    yield
    opened.RUNNING.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=opened.REAL.get(name, ())) for name in opened.OPENERS],
)
def backend(request, tmp_path_factory):
    """One engine at a time, for all of its tests."""
    with opened.OPENERS[request.param](tmp_path_factory.mktemp("engine")) as subject:
        yield subject


@pytest.mark.parametrize(
    "promise",
    [
        promises.answers_come_in_the_order_of_requests,
        promises.tokens_carry_what_a_trainer_needs,
        promises.seeds_repeat,
        promises.what_is_streamed_is_what_comes_whole,
        promises.scores_are_the_logprobs_that_were_reported,
        promises.alternatives_are_the_likeliest_in_order,
        promises.strange_prompts_are_refused,
        promises.a_longest_prompt_is_not_cut,
        promises.the_fingerprint_names_the_engine_and_no_secret,
        promises.closing_twice_is_fine,
    ],
    ids=lambda promise: promise.__name__,
)
def test_a_backend_keeps(backend, promise):
    promise(backend)


def test_what_a_backend_does_not_claim_it_refuses(backend, checkpoints):
    promises.what_is_not_claimed_is_refused(backend, checkpoints)


def test_new_weights_change_the_numbers(backend, checkpoints):
    promises.new_weights_change_the_numbers(backend, checkpoints)


@pytest.mark.parametrize(
    "release", [pytest.param(name, marks=opened.MARKS[name]) for name in opened.GENERATES.values()]
)
def test_vllms_two_routes_give_the_same_tokens_and_the_same_bits(release, tmp_path):
    requests = [
        Request(Prompt((5, 6)), SamplingParams(max_tokens=8, seed=3, n=2, logprobs=4)),
        Request(
            Prompt((9, 8, 7)),
            SamplingParams(max_tokens=8, seed=40, temperature=0.7, top_p=0.9, logit_bias={7: 2.0}),
        ),
        Request(
            Prompt((11, 12)),
            SamplingParams(max_tokens=8, seed=1, temperature=0.0, prompt_logprobs=0, repetition_penalty=1.2),
        ),
    ]
    seen = []
    for route in ("completions", "generate"):
        with opened.vllm(release, tmp_path, route) as subject:
            backend = subject.backend
            assert backend.capabilities == frozenset(Capability)
            # One at a time, so that both are computed in the same batches.
            answers = [backend.generate([request])[0] for request in requests]
            seen.append((answers, backend.score([(5, 6, 7, 8)])))

    (completed, scores), (generated, scores_too) = seen
    assert scores == scores_too
    for answer, other in zip(completed, generated, strict=True):
        assert answer.problems == other.problems == ()
        for mine, its in zip(answer.completions, other.completions, strict=True):
            assert (mine.token_ids, mine.logprobs) == (its.token_ids, its.logprobs)
            assert mine.top_logprobs == its.top_logprobs
            assert mine.prompt_logprobs == its.prompt_logprobs
            assert mine.finish_reason == its.finish_reason
            assert mine.versions == its.versions


def test_weights_of_another_shape_are_refused(backend, checkpoints):
    """Last in the file: an engine that took them would answer no more."""
    promises.weights_of_another_shape_are_refused(backend, checkpoints)
