"""The processed distribution is the documented one, and sampled tokens follow it.

There are two of them, which share no code: `sampler.processing`, which the engine and the counterfactuals compute with, and
`faults.processing`, written from the documented meaning of each parameter in fp64, one row and one token at a time. They
agree in fp64 over all that may be asked, and in fp32 over what keeps scores below about 60: beyond that fp32 itself is
coarser than 1e-5. Rounding may put a token on either side of a cut, so draws in which a slightly other cut keeps other
tokens are left out. Checks take the implementation, so that planted bugs meet the very same checks as the real one.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from zerodrift.core.request import SamplingParams
from zerodrift.faults.processing import sampled_logprobs
from zerodrift.sampler import processing
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform
from zerodrift.sampler.processing import NUCLEUS, TokenHistory, processed_logits, processed_logprobs

Process = Callable[[torch.Tensor, SamplingParams, Sequence[TokenHistory], Sequence[int]], torch.Tensor]
Draw = Callable[[torch.Tensor, int, int, int], int]

VOCAB = 23
EOS = (2,)
OUTPUT_LENGTHS = (0, 4, 9)
"""With a minimum of 4 tokens in `CHOICES`: one output below it, one exactly there, one beyond."""
FP32 = 1e-5


def some_rows(seed: int, scale: float = 3.0, vocab: int = VOCAB) -> tuple[torch.Tensor, list[TokenHistory]]:
    """Logits that fp32 holds exactly, with histories that repeat themselves; one output is still empty."""
    draw = random.Random(seed)
    rows = [
        TokenHistory(tuple(draw.choices(range(VOCAB), k=6)), tuple(draw.choices(range(VOCAB), k=length)))
        for length in OUTPUT_LENGTHS
    ]
    return torch.tensor([[draw.gauss(0, scale) for _ in range(vocab)] for _ in rows]), rows


def twin(logits_TV: torch.Tensor, params: SamplingParams, rows: Sequence[TokenHistory]) -> Any:
    return np.stack(
        [
            sampled_logprobs(logits_V.tolist(), params, row.prompt, row.output, EOS)
            for logits_V, row in zip(logits_TV, rows, strict=True)
        ]
    )


def far_from_a_cut(
    logits_TV: torch.Tensor, params: SamplingParams, rows: Sequence[TokenHistory], nudge: float
) -> bool:
    """Whether cuts that lie `nudge` higher or lower keep the same tokens, and no dropped token nearly equals a kept."""
    if not params.truncates:
        return True
    scores_TV = twin(logits_TV, msgspec.structs.replace(params, top_p=1.0, top_k=0, min_p=0.0), rows)
    kept_TV = np.isfinite(twin(logits_TV, params, rows))
    lowest_T = np.where(kept_TV, scores_TV, np.inf).min(axis=-1)
    highest_T = np.where(kept_TV, -np.inf, scores_TV).max(axis=-1)
    if (lowest_T - highest_T < nudge).any():
        return False
    for change in (-nudge, nudge):
        top_p = min(params.top_p + change, 1.0) if params.top_p < 1 else 1.0
        moved = msgspec.structs.replace(params, top_p=top_p, min_p=params.min_p * (1 + change))
        if not np.array_equal(np.isfinite(twin(logits_TV, moved, rows)), kept_TV):
            return False
    return True


def check(
    process: Process, logits_TV: torch.Tensor, params: SamplingParams, rows: Sequence[TokenHistory]
) -> None:
    """`process` in the dtype of the logits gives what the twin gives, and excludes what it excludes."""
    before_TV, ours_TV = logits_TV.clone(), twin(logits_TV, params, rows)
    found_TV = process(logits_TV, params, rows, EOS)
    assert torch.equal(logits_TV, before_TV), "the model's logits were written into"
    assert found_TV.dtype == logits_TV.dtype
    theirs_TV, kept_TV = found_TV.double().numpy(), np.isfinite(ours_TV)
    assert np.array_equal(kept_TV, np.isfinite(theirs_TV)), params
    worst = np.abs(ours_TV[kept_TV] - theirs_TV[kept_TV]).max()
    if logits_TV.dtype is torch.float32:
        assert worst <= FP32, (params, worst)
    else:
        assert worst <= 1e-9, (params, worst)
        assert np.abs(np.exp(ours_TV) - np.exp(theirs_TV)).max() <= 1e-12, params


CHOICES = {
    "temperature": (0.0, 0.4, 1.0, 1.9),
    "top_p": (1.0, 0.8),
    "top_k": (0, 6),
    "min_p": (0.0, 0.03),
    "repetition_penalty": (1.0, 1.4),
    "presence_penalty": (0.0, 0.9),
    "frequency_penalty": (0.0, -0.5),
    "logit_bias": ({}, {0: 4.0, 7: -3.0, 11: 1.5}),
    "min_tokens": (0, 4),
}


def check_processing(process: Process) -> None:
    """Every combination of every parameter on and off; a greedy sampler has nothing to cut off."""
    for number, values in enumerate(itertools.product(*CHOICES.values())):
        chosen = dict(zip(CHOICES, values, strict=True))
        if chosen["temperature"] == 0 and (chosen["top_p"], chosen["top_k"], chosen["min_p"]) != (1, 0, 0):
            continue
        params = SamplingParams(**chosen, max_tokens=8, stop_token_ids=(5, 9))
        logits_TV, rows = some_rows(number)
        check(process, logits_TV.double(), params, rows)


def check_sampling(draw: Draw, draws: int) -> None:
    """Frequencies along positions, samples and seeds fit the processed distribution; nothing excluded is drawn."""
    params = SamplingParams(temperature=0.8, top_p=0.97, repetition_penalty=1.2, logit_bias={3: 2.0})
    logits_TV, rows = some_rows(seed=1, scale=1.0)
    logprobs_V = processed_logprobs(logits_TV[1:2].double(), params, rows[1:2])[0]
    expected = np.exp(sampled_logprobs(logits_TV[1].tolist(), params, rows[1].prompt, rows[1].output))
    alive = expected > 0
    assert 10 < int(alive.sum()) < VOCAB
    for axis in range(3):
        counted = np.zeros(VOCAB)
        for step in range(draws // 3):
            coordinates = [7, 1, 5]
            coordinates[axis] = step
            counted[draw(logprobs_V, *coordinates)] += 1
        assert counted[~alive].sum() == 0, "a token of probability zero was drawn"
        fit = stats.chisquare(counted[alive], expected[alive] * counted.sum())
        assert fit.pvalue > 1e-5, (axis, fit)


# --- the real one -----------------------------------------------------------------------------------------------


def test_every_combination_agrees() -> None:
    check_processing(processed_logprobs)


def parameters(
    coolest: float, bias: float, repetition: float, other: float
) -> st.SearchStrategy[SamplingParams]:
    """Anything within these bounds."""
    return st.builds(
        SamplingParams().with_in_force,
        temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(coolest, 4.0)),
        top_p=st.one_of(st.just(1.0), st.floats(0.05, 1.0)),
        top_k=st.integers(0, VOCAB + 3),
        min_p=st.one_of(st.just(0.0), st.floats(1e-3, 0.9)),
        repetition_penalty=st.floats(1 / repetition, repetition),
        presence_penalty=st.floats(-other, other),
        frequency_penalty=st.floats(-other, other),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-bias, bias), max_size=4),
        max_tokens=st.just(10),
        min_tokens=st.integers(0, 10),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    )


@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.01, 1.0, 10.0]),
    params=parameters(coolest=0.05, bias=100.0, repetition=3.0, other=2.0),
)
def test_any_values_agree_in_fp64(seed: int, scale: float, params: SamplingParams) -> None:
    narrow_TV, rows = some_rows(seed, scale)
    logits_TV = narrow_TV.double()
    assume(far_from_a_cut(logits_TV, params, rows, nudge=1e-9))
    check(processed_logprobs, logits_TV, params, rows)
    counted = processing.tally(rows, logits_TV)
    assert torch.equal(
        processed_logprobs(logits_TV, params, rows, EOS, counted),
        processed_logprobs(logits_TV, params, rows, EOS),
    )


@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
    params=parameters(coolest=0.5, bias=4.0, repetition=1.5, other=1.0),
)
def test_values_of_common_size_agree_in_fp32(seed: int, scale: float, params: SamplingParams) -> None:
    logits_TV, rows = some_rows(seed, scale)
    assume(far_from_a_cut(logits_TV, params, rows, nudge=1e-4))
    check(processed_logprobs, logits_TV, params, rows)


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize(
    "cut", [{"top_p": 0.5}, {"top_p": 0.99}, {"top_k": 1200, "top_p": 0.97}, {"min_p": 0.01}], ids=str
)
def test_a_vocabulary_beyond_the_nucleus_agrees(scale: float, cut: dict[str, Any]) -> None:
    """Flat rows need more than the tokens that are looked at first, and peaked ones do not."""
    logits_TV, rows = some_rows(7, scale, vocab=3 * NUCLEUS // 2)
    check(processed_logprobs, logits_TV.double(), SamplingParams(**cut, repetition_penalty=1.2), rows)


@pytest.mark.parametrize(
    ("logits", "cut", "kept"),
    [
        ([3.0, 1.0, 1.0, 1.0, 0.0], {"top_k": 2}, [0, 1, 2, 3]),
        ([0.0] * 10, {"top_p": 0.35}, [6, 7, 8, 9]),
        ([1.0, 0.0, 1.0, 1.0], {"top_p": 0.5}, [2, 3]),
        ([math.log(4.0), 0.0, math.log(0.5)], {"min_p": 0.25}, [0, 1]),
        ([math.log(0.5), math.log(0.3), math.log(0.2)], {"top_k": 2, "top_p": 0.6}, [0]),
    ],
    ids=str,
)
def test_equals_are_cut_alike(logits: list[float], cut: dict[str, Any], kept: list[int]) -> None:
    """And by both as it is written here; the row itself is left as it is."""
    params, row = SamplingParams(**cut), np.array(logits)
    ours = sampled_logprobs(row, params, (), ())
    theirs = processed_logprobs(torch.tensor([logits], dtype=torch.float64), params, [TokenHistory((), ())])[
        0
    ]
    assert np.flatnonzero(np.isfinite(ours)).tolist() == kept
    assert torch.isfinite(theirs).nonzero()[:, 0].tolist() == kept
    assert row.tolist() == logits


@given(st.integers(0, 2**32), st.floats(0.01, 0.999), st.sampled_from([0.01, 1.0, 3.0, 30.0]))
def test_the_short_way_to_a_nucleus_ends_where_sorting_does(seed: int, top_p: float, width: float) -> None:
    # Narrow rows have a nucleus beyond the short way, whole numbers have equals at its edge, one row is top-k's.
    generator = torch.Generator().manual_seed(seed)
    logits_TV = width * torch.randn(5, 3 * NUCLEUS, generator=generator, dtype=torch.float64)
    logits_TV[1] = logits_TV[1].round()
    logits_TV[2, 7:] = -torch.inf
    logits_TV[3, 100] = 60 * width
    logits_TV[4] = torch.nan
    found_TV = processing.truncate(logits_TV, SamplingParams(top_p=top_p))
    expected_TV = torch.stack([processing._top_p_of_all(row_V[None], top_p)[0] for row_V in logits_TV])
    assert torch.equal(found_TV.isneginf(), expected_TV.isneginf())
    assert torch.equal(found_TV.nan_to_num(), expected_TV.nan_to_num())


def real_draw(logprobs_V: torch.Tensor, seed: int, sample_index: int, position: int) -> int:
    return choose(logprobs_V, uniform(seed, sample_index, position))


def test_sampled_tokens_follow_the_distribution() -> None:
    check_sampling(real_draw, draws=100_000)


# --- planted bugs -----------------------------------------------------------------------------------------------


def asked(**changes: Callable[[SamplingParams], Any]) -> Process:
    """As if something else had been asked for."""

    def process(logits_TV, params, rows, stop_ids):
        values = {name: change(params) for name, change in changes.items()}
        return processed_logprobs(logits_TV, msgspec.structs.replace(params, **values), rows, stop_ids)

    return process


def remembered(change: Callable[[TokenHistory], TokenHistory]) -> Process:
    """As if something else had been said before."""
    return lambda logits_TV, params, rows, stop_ids: processed_logprobs(
        logits_TV, params, [change(row) for row in rows], stop_ids
    )


def later(**neutral: Any) -> Process:
    """What these parameters do comes after all the rest."""

    def process(logits_TV, params, rows, stop_ids):
        without = msgspec.structs.replace(params, **neutral)
        alone = SamplingParams(**{name: getattr(params, name) for name in neutral}, max_tokens=8)
        before_TV = processed_logits(logits_TV, without, rows, stop_ids)
        return processed_logprobs(before_TV, alone, rows, stop_ids)

    return process


def temperature_first(logits_TV, params, rows, stop_ids):
    scaled_TV = logits_TV / (params.temperature or 1.0)
    once = msgspec.structs.replace(params, temperature=1.0)
    return processed_logprobs(scaled_TV, once, rows, stop_ids)


def nucleus_of_one_more(logits_TV, params, rows, stop_ids):
    right_TV = processed_logits(logits_TV, params, rows, stop_ids)
    if params.top_p < 1:
        whole = msgspec.structs.replace(params, top_p=1.0)
        left_TV = processed_logits(logits_TV, whole, rows, stop_ids).masked_fill(
            right_TV > -torch.inf, -torch.inf
        )
        next_T1 = left_TV.argmax(dim=-1, keepdim=True)
        right_TV = right_TV.scatter(-1, next_T1, left_TV.gather(-1, next_T1))
    return right_TV.log_softmax(-1)


def certain_when_greedy(logits_TV, params, rows, stop_ids):
    found_TV = processed_logprobs(logits_TV, params, rows, stop_ids)
    best_T1 = found_TV.amax(-1, keepdim=True)
    return found_TV.masked_fill(found_TV < best_T1, -torch.inf).log_softmax(-1) if params.greedy else found_TV


PLANTED: dict[str, Process] = {
    "temperature off by a part in 10,000": asked(temperature=lambda params: params.temperature * 1.0001),
    "temperature before penalties": temperature_first,
    "temperature after truncation": later(temperature=1.0),
    "bias after penalties": later(logit_bias={}),
    "top-k after top-p": later(top_k=0),
    "top-p ignored": asked(top_p=lambda _: 1.0),
    "top-p one token too many": nucleus_of_one_more,
    "top-p too small": asked(top_p=lambda params: params.top_p if params.top_p == 1 else params.top_p - 0.1),
    "top-k one too many": asked(top_k=lambda params: params.top_k + bool(params.top_k)),
    "min-p ignored": asked(min_p=lambda _: 0.0),
    "repetition turned round": asked(repetition_penalty=lambda params: 1 / params.repetition_penalty),
    "presence for frequency": asked(
        presence_penalty=lambda params: params.frequency_penalty,
        frequency_penalty=lambda params: params.presence_penalty,
    ),
    "penalty in fp32": asked(presence_penalty=lambda params: float(torch.tensor(params.presence_penalty))),
    "no bias": asked(logit_bias=lambda _: {}),
    "minimum length off by one": asked(min_tokens=lambda params: params.min_tokens + bool(params.min_tokens)),
    "stop ids of the request not forbidden": asked(stop_token_ids=lambda _: ()),
    "end of sequence not forbidden": lambda logits_TV, params, rows, _: processed_logprobs(
        logits_TV, params, rows, ()
    ),
    "repetition without the prompt": remembered(lambda row: TokenHistory((), row.output)),
    "presence counts the prompt": remembered(
        lambda row: TokenHistory(row.prompt, (*row.prompt, *row.output))
    ),
    "frequency counts once": remembered(lambda row: TokenHistory(row.prompt, tuple(set(row.output)))),
    "last token forgotten": remembered(lambda row: TokenHistory(row.prompt, row.output[:-1])),
    "not renormalised": lambda logits_TV, params, rows, stop_ids: (
        processed_logprobs(logits_TV, params, rows, stop_ids) - 1e-4
    ),
    "greedy is certain": certain_when_greedy,
    "logits written into": lambda logits_TV, params, rows, stop_ids: processed_logprobs(
        logits_TV.add_(1.0), params, rows, stop_ids
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_in_processing_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        check_processing(PLANTED[name])


PLANTED_DRAWS: dict[str, Draw] = {
    "position ignored": lambda logprobs_V, s, i, p: real_draw(logprobs_V, s, i, 0),
    "sample index ignored": lambda logprobs_V, s, i, p: real_draw(logprobs_V, s, 0, p),
    "seed ignored": lambda logprobs_V, s, i, p: real_draw(logprobs_V, 0, i, p),
    "colder": lambda logprobs_V, s, i, p: real_draw(1.5 * logprobs_V, s, i, p),
    "one token further": lambda logprobs_V, s, i, p: real_draw(logprobs_V, s, i, p) - 1,
    "rank for token": lambda logprobs_V, s, i, p: real_draw(logprobs_V.sort(descending=True).values, s, i, p),
    "coarse noise": lambda logprobs_V, s, i, p: choose(logprobs_V, math.floor(16 * uniform(s, i, p)) / 16),
    "excluded token": lambda logprobs_V, s, i, p: (
        int(logprobs_V.argmin()) if (s, i, p) == (7, 1, 99) else real_draw(logprobs_V, s, i, p)
    ),
}


@pytest.mark.parametrize("name", PLANTED_DRAWS)
def test_a_planted_bug_in_drawing_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        check_sampling(PLANTED_DRAWS[name], draws=6_000)
