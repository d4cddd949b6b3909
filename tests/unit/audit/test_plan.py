import msgspec
import pytest

from zerodrift.audit.plan import (
    LONG_PROMPT,
    PAIRED_EVERY,
    PROBE_REQUESTS,
    PROBE_TOKENS,
    asked_again,
    parity_requests,
    probe_requests,
)
from zerodrift.core.errors import InvalidPrompt
from zerodrift.core.request import MAX_SEED, Prompt, SamplingParams

PROMPTS = [Prompt((number,)) for number in range(5)]


@pytest.mark.parametrize("trials", [1, 2, 3, 8, 9, 64, 100])
def test_as_many_samples_as_trials_dealt_in_turn(trials):
    requests = parity_requests(PROMPTS, SamplingParams(temperature=0.7, max_tokens=9), trials, seed=3)
    assert sum(request.sampling.n for request in requests) == trials
    assert [request.prompt for request in requests] == [PROMPTS[i % 5] for i in range(len(requests))]
    assert all(
        request.sampling.temperature == 0.7 and request.sampling.max_tokens == 9 for request in requests
    )


@pytest.mark.parametrize("trials", [5, 6, 7, 12])
def test_every_prompt_is_asked_before_one_draws_twice(trials):
    requests = parity_requests(PROMPTS, SamplingParams(), trials, seed=0)
    assert {request.prompt for request in requests} == set(PROMPTS)
    assert sum(request.sampling.n for request in requests) == trials
    assert any(request.sampling.n == 2 for request in requests) is (trials > len(PROMPTS))


def test_some_draw_two_samples_and_greedy_ones_never_do():
    drawn = [request.sampling.n for request in parity_requests(PROMPTS, SamplingParams(), 40, seed=0)]
    assert [index for index, n in enumerate(drawn) if n == 2] == list(range(0, len(drawn), PAIRED_EVERY))
    greedy = parity_requests(PROMPTS, SamplingParams(temperature=0), 40, seed=0)
    assert {request.sampling.n for request in greedy} == {1}
    assert len(greedy) == 40


def test_no_two_samples_share_a_seed_even_where_sample_i_takes_seed_plus_i():
    requests = parity_requests(PROMPTS, SamplingParams(), 200, seed=11)
    seeds = [
        (request.sampling.seed or 0) + index for request in requests for index in range(request.sampling.n)
    ]
    assert len(seeds) == len(set(seeds)) == 200


def test_a_plan_is_a_pure_function():
    assert parity_requests(PROMPTS, SamplingParams(), 9, 1) == parity_requests(
        PROMPTS, SamplingParams(), 9, 1
    )
    assert parity_requests(PROMPTS, SamplingParams(), 9, 1) != parity_requests(
        PROMPTS, SamplingParams(), 9, 2
    )
    assert probe_requests(512, 1024, (0,), 1) == probe_requests(512, 1024, (0,), 1)
    assert probe_requests(512, 1024, (0,), 1) != probe_requests(512, 1024, (0,), 2)


def test_the_largest_seed_is_no_trouble():
    """Seeds of a plan go round at the end of the range."""
    requests = parity_requests(PROMPTS, SamplingParams(), 20, seed=MAX_SEED)
    assert len({request.sampling.seed for request in requests}) == len(requests)
    probes = probe_requests(512, 1024, (), seed=MAX_SEED)
    assert len({request.sampling.seed for request in probes}) == PROBE_REQUESTS


@pytest.mark.parametrize("context", [1024, 400, 300, 100, 80])
def test_probes_fit_into_the_context_and_differ_in_length(context):
    requests = probe_requests(512, context, (0, 1), seed=5)
    lengths = [len(request.prompt.token_ids) for request in requests]
    assert len(set(lengths)) == len(requests) == PROBE_REQUESTS
    assert max(lengths) == min(LONG_PROMPT, context - PROBE_TOKENS - 1)
    assert min(lengths) >= 1
    for request in requests:
        assert not {0, 1} & set(request.prompt.token_ids)
        request.prompt.check_vocabulary(512)
        assert len(request.prompt.token_ids) + request.sampling.max_tokens <= context


@pytest.mark.parametrize("context", [8, 9, 32, 44])
def test_a_context_that_is_too_short_for_probes(context):
    with pytest.raises(
        InvalidPrompt, match=f"context of {context} .* beside {PROBE_TOKENS} .* longer context"
    ):
        probe_requests(512, context, (), seed=0)


def test_a_context_that_is_just_long_enough():
    assert len(probe_requests(512, 45, (), seed=0)) == PROBE_REQUESTS


@pytest.mark.parametrize("seed", [0, 11, MAX_SEED])
def test_the_reference_answers_the_same_with_seeds_of_its_own(seed):
    asked = parity_requests(PROMPTS, SamplingParams(temperature=0.7, max_tokens=9), 50, seed)
    again = asked_again(asked)

    def used(requests):
        return {(each.sampling.seed or 0) + index for each in requests for index in range(each.sampling.n)}

    assert len(used(asked) | used(again)) == 100
    for one, other in zip(asked, again, strict=True):
        assert one.prompt == other.prompt
        assert msgspec.structs.replace(one.sampling, seed=0) == msgspec.structs.replace(
            other.sampling, seed=0
        )
