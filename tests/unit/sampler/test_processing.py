"""Edges that random logits never meet: ties, dtypes, nothing left. The rest is in tests/property/test_sampler.py."""

import math
import tracemalloc

import pytest
import torch

from zerodrift.core.errors import InvalidSampling
from zerodrift.core.request import SamplingParams
from zerodrift.sampler.prefix import Prefix
from zerodrift.sampler.processing import TokenHistory, histories, processed_logprobs, tally

NOTHING = [TokenHistory((0,), ())]


def kept(logits: list[float], **options: float) -> list[int]:
    """Tokens that survive."""
    params = SamplingParams(**options)
    logprobs_V = processed_logprobs(torch.tensor([logits], dtype=torch.float64), params, NOTHING)[0]
    assert logprobs_V.exp().sum() == pytest.approx(1, abs=1e-12)
    return [token for token, value in enumerate(logprobs_V.tolist()) if value > -math.inf]


def test_a_history_holds_what_was_known_when_the_token_was_drawn():
    rows = histories((1, 2), (7, 8, 9))
    assert [row.prompt for row in rows] == [(1, 2)] * 3
    assert [list(row.output) for row in rows] == [[], [7], [7, 8]]
    assert histories((1,), ()) == []


def test_a_prefix_is_a_sequence_of_the_first_ids():
    prefix = Prefix((7, 8, 9, 9), 3)
    assert (len(prefix), list(prefix), prefix[0], prefix[-1]) == (3, [7, 8, 9], 7, 9)
    assert (prefix[1:], prefix[::-1], prefix[5:]) == ((8, 9), (9, 8, 7), ())
    assert 9 in prefix
    assert prefix.count(9) == 1
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            prefix[beyond]


def test_an_output_that_goes_on_does_not_change_the_past():
    output = [7, 8]
    rows = histories((1,), output)
    output[0] = 5
    assert list(rows[1].output) == [7]


def test_memory_grows_with_the_length_and_not_with_its_square():
    """2,000 prefixes as tuples are 16 MB, and as many rows and tokens again to count them."""
    length = 2000
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=1.1)
    output = [position % 3 for position in range(length)]
    tracemalloc.start()
    try:
        rows = histories([0, 1] * 50, output)
        processed_logprobs(torch.zeros(length, 4), params, rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_counts_are_those_of_each_row_by_itself(dtype):
    """Neighbours that go on where the last one stopped, that stop earlier, and that have nothing in common."""
    one, other = histories((1, 2), (3, 3, 4, 1)), histories((2,), (4, 4))
    rows = [*one, *other, one[2], one[1], TokenHistory((5,), [3, 3]), one[3], one[3]]
    counted = tally(rows, torch.zeros(len(rows), 6, dtype=dtype))
    for row, history in enumerate(rows):
        ids = counted.ids_TK[row].tolist()
        assert {*history.prompt, *history.output} <= {*ids}
        told = zip(ids, counted.output_TK[row].tolist(), counted.seen_TK[row].tolist(), strict=True)
        for token, count, seen in told:
            assert count == list(history.output).count(token)
            assert seen is (token in {*history.prompt, *history.output})
    assert counted.output_TK.dtype is dtype


def test_rows_without_any_history_are_left_alone():
    logits_TV = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)
    rows = [TokenHistory((), ()), TokenHistory((3,), (3,))]
    changed = processed_logprobs(logits_TV, params, rows) - torch.log_softmax(logits_TV, dim=-1)
    assert torch.equal(changed[0], torch.zeros(5))
    assert ((changed[1] - changed[1, 0]).abs() > 1e-5).nonzero().flatten().tolist() == [3]


def test_top_k_keeps_all_that_tie_with_the_last():
    """As vLLM does: which of two equals is dropped would depend on the order of a sort."""
    assert kept([3.0, 1.0, 1.0, 1.0, 0.0], top_k=2) == [0, 1, 2, 3]
    assert kept([1.0, 1.0, 1.0], top_k=1) == [0, 1, 2]


@pytest.mark.parametrize("top_k", [3, 4, 10**6])
def test_a_top_k_of_the_vocabulary_or_more_keeps_all(top_k):
    assert kept([0.0, 1.0, 2.0], top_k=top_k) == [0, 1, 2]


def test_top_k_counts_what_min_p_left():
    assert kept([0.0, math.log(0.5), math.log(0.4), math.log(0.01)], min_p=0.45, top_k=3) == [0, 1]


@pytest.mark.parametrize("top_p", [1e-300, 1e-17, 0.3, 0.49])
def test_the_likeliest_always_stays(top_p):
    assert kept([math.log(0.5), math.log(0.3), math.log(0.2)], top_p=top_p) == [0]


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.51, [0, 1]), (0.79, [0, 1]), (0.81, [0, 1, 2]), (1.0, [0, 1, 2])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, expected):
    assert kept([math.log(0.5), math.log(0.3), math.log(0.2)], top_p=top_p) == expected


def test_top_p_renormalises_what_top_k_left():
    """0.5 and 0.3 become 0.625 and 0.375: the first alone reaches 0.6, and would not have without top-k."""
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    assert kept(logits, top_p=0.6, top_k=2) == [0]
    assert kept(logits, top_p=0.6) == [0, 1]


def test_top_p_drops_the_lower_ids_of_equals():
    """Any choice is right; it must only be the same every time."""
    assert kept([0.0] * 10, top_p=0.35) == [6, 7, 8, 9]


def test_min_p_keeps_what_is_exactly_at_the_floor():
    assert kept([math.log(4.0), 0.0, math.log(0.5)], min_p=0.25) == [0, 1]


def test_a_forbidden_token_stays_forbidden_whatever_is_added():
    params = SamplingParams(
        min_tokens=1,
        stop_token_ids=(1,),
        logit_bias={1: 100.0},
        repetition_penalty=0.5,
        frequency_penalty=-2.0,
    )
    logits_TV = torch.zeros(1, 3, dtype=torch.float64)
    logprobs_V = processed_logprobs(logits_TV, params, [TokenHistory((1,), ())])[0]
    assert logprobs_V.tolist() == pytest.approx([-math.log(2), -math.inf, -math.log(2)])


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 1, "stop_token_ids": (1,)},
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"temperature": 0.5, "top_k": 1, "top_p": 0.5, "min_p": 0.5},
    ],
    ids=str,
)
def test_the_logits_of_the_model_are_left_as_they_are(options):
    """They are used again: for the raw logprob, and for the next account of what happened."""
    logits_TV = torch.tensor([[0.0, 1.0, 2.0]])
    processed_logprobs(logits_TV, SamplingParams(**options), [TokenHistory((1,), ())])
    assert logits_TV.tolist() == [[0.0, 1.0, 2.0]]


def test_a_minimum_that_forbids_everything_is_refused():
    params = SamplingParams(min_tokens=2, stop_token_ids=(0, 1))
    with pytest.raises(InvalidSampling):
        processed_logprobs(torch.zeros(1, 3), params, NOTHING, stop_ids=(2,))
    # Once the minimum is reached nothing is forbidden.
    processed_logprobs(torch.zeros(1, 3), params, [TokenHistory((0,), (0, 0))], stop_ids=(2,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_step_keeps_the_dtype(dtype):
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=4,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={2: 1.0},
        min_tokens=2,
        stop_token_ids=(1,),
    )
    logits_TV = torch.linspace(-2, 2, 8).repeat(2, 1).to(dtype)
    logprobs_TV = processed_logprobs(
        logits_TV, params, [TokenHistory((3,), ()), TokenHistory((3,), (4, 4, 5))]
    )
    assert logprobs_TV.dtype is dtype
    assert not logprobs_TV.isnan().any()
