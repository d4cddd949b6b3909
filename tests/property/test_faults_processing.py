"""The distribution that faults state is the one that counterfactuals predict with, though they share no code.

In fp64 over all that may be asked, and in fp32, as the counterfactuals compute, over what keeps scores below about 60:
beyond that fp32 itself is coarser than 1e-5. Rounding may put a token on either side of a cut, so draws in which a
slightly other cut keeps other tokens are left out. Planted bugs meet the same check.
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

from zerodrift.core.request import SamplingParams
from zerodrift.faults.processing import sampled_logprobs
from zerodrift.sampler.processing import NUCLEUS, TokenHistory, processed_logprobs

Process = Callable[[torch.Tensor, SamplingParams, Sequence[TokenHistory], Sequence[int]], torch.Tensor]

VOCAB = 23
EOS = (2,)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def some_rows(seed: int, scale: float, vocab: int = VOCAB) -> tuple[torch.Tensor, list[TokenHistory]]:
    """Logits that fp32 holds exactly, with histories that repeat themselves; one output is still empty."""
    draw = random.Random(seed)
    rows = [
        TokenHistory(tuple(draw.choices(range(VOCAB), k=6)), tuple(draw.choices(range(VOCAB), k=length)))
        for length in (0, 4, 9)
    ]
    logits_TV = torch.tensor([[draw.gauss(0, scale) for _ in range(vocab)] for _ in rows])
    return logits_TV, rows


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
    ours_TV = twin(logits_TV, params, rows)
    theirs_TV = process(logits_TV, params, rows, EOS).double().numpy()
    assert np.array_equal(np.isfinite(ours_TV), np.isfinite(theirs_TV)), params
    kept_TV = np.isfinite(ours_TV)
    worst = np.abs(ours_TV[kept_TV] - theirs_TV[kept_TV]).max()
    assert worst <= TOLERANCE[logits_TV.dtype], (params, worst)


# --- agreement --------------------------------------------------------------------------------------------------


def parameters(
    coolest: float, bias: float, repetition: float, other: float
) -> st.SearchStrategy[SamplingParams]:
    """Anything within these bounds; a greedy sampler has nothing to cut off."""
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
    logits_TV, rows = some_rows(seed, scale)
    assume(far_from_a_cut(logits_TV, params, rows, nudge=1e-9))
    check(processed_logprobs, logits_TV.double(), params, rows)


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
    params = SamplingParams(**cut)
    ours = sampled_logprobs(logits, params, (), ())
    theirs = processed_logprobs(torch.tensor([logits], dtype=torch.float64), params, [TokenHistory((), ())])[
        0
    ]
    assert np.flatnonzero(np.isfinite(ours)).tolist() == kept
    assert torch.isfinite(theirs).nonzero()[:, 0].tolist() == kept


def test_the_row_of_logits_is_left_as_it_is() -> None:
    logits = np.zeros(VOCAB)
    sampled_logprobs(logits, SamplingParams(logit_bias={0: 1.0}, temperature=0.5, top_k=1), (1,), (1,))
    assert not logits.any()


# --- planted bugs -----------------------------------------------------------------------------------------------

CHOICES = {
    "temperature": (1.0, 0.7),
    "cut": ({}, {"top_p": 0.8}, {"top_k": 6}, {"min_p": 0.03}),
    "penalties": ({}, {"repetition_penalty": 1.4}, {"presence_penalty": 0.9}, {"frequency_penalty": 0.5}),
    "forced": ({}, {"logit_bias": {0: 3.0, 7: -3.0}}, {"min_tokens": 4, "stop_token_ids": (5, 9)}),
}


def check_every_parameter(process: Process) -> None:
    """Each parameter on and off, beside each other kind."""
    for number, (temperature, *others) in enumerate(itertools.product(*CHOICES.values())):
        options = {name: value for group in others for name, value in group.items()}
        params = SamplingParams(temperature=temperature, max_tokens=8, **options)
        logits_TV, rows = some_rows(number, scale=2.0)
        check(process, logits_TV, params, rows)


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


PLANTED: dict[str, Process] = {
    "temperature off by a part in 10,000": asked(temperature=lambda params: params.temperature * 1.0001),
    "top-p ignored": asked(top_p=lambda _: 1.0),
    "top-k one too many": asked(top_k=lambda params: params.top_k + bool(params.top_k)),
    "min-p ignored": asked(min_p=lambda _: 0.0),
    "repetition turned round": asked(repetition_penalty=lambda params: 1 / params.repetition_penalty),
    "presence for frequency": asked(
        presence_penalty=lambda params: params.frequency_penalty,
        frequency_penalty=lambda params: params.presence_penalty,
    ),
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
    "last token forgotten": remembered(lambda row: TokenHistory(row.prompt, row.output[:-1])),
    "not renormalised": lambda logits_TV, params, rows, stop_ids: (
        processed_logprobs(logits_TV, params, rows, stop_ids) - 1e-4
    ),
}


def test_every_parameter_agrees() -> None:
    check_every_parameter(processed_logprobs)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        check_every_parameter(PLANTED[name])
