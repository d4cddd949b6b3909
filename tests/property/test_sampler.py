"""The processed distribution is the documented one, and sampled tokens follow it.

The oracle below is written from the order that vLLM documents (minimum length, bias, penalties, temperature, min-p,
top-k, top-p, renormalisation) in plain Python. Checks take the implementation, so that planted bugs meet the very
same checks as the real one.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from zerodrift.core.request import SamplingParams
from zerodrift.sampler import processing
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform
from zerodrift.sampler.processing import TokenHistory

Process = Callable[[torch.Tensor, SamplingParams, Sequence[TokenHistory], Sequence[int]], torch.Tensor]
Draw = Callable[[torch.Tensor, int, int, int], int]

VOCAB = 23
EOS = 2
OUTPUT_LENGTHS = (0, 4, 9)
"""With a minimum of 4 tokens in `CHOICES`: one output below it, one exactly there, one beyond."""


# --- the oracle -------------------------------------------------------------------------------------------------


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def slow_probabilities(
    logits: Sequence[float], params: SamplingParams, history: TokenHistory, stop_ids: Sequence[int]
) -> list[float]:
    """One row, token by token."""
    logits = [_adjusted(token, logit, params, history, stop_ids) for token, logit in enumerate(logits)]
    if params.temperature == 0:
        return softmax(logits)
    logits = [logit / params.temperature for logit in logits]
    probabilities = softmax(logits)
    kept = {
        token for token, mass in enumerate(probabilities) if mass >= params.min_p * max(probabilities)
    } - {token for token, mass in enumerate(probabilities) if mass == 0}
    by_mass = sorted(kept, key=lambda token: -probabilities[token])
    if params.top_k:
        by_mass = by_mass[: params.top_k]
    left = math.fsum(probabilities[token] for token in by_mass)
    nucleus, mass = [], 0.0
    for token in by_mass:
        if params.top_p < 1 and mass >= params.top_p:
            break
        nucleus.append(token)
        mass += probabilities[token] / left
    total = math.fsum(probabilities[token] for token in nucleus)
    return [probabilities[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


def _adjusted(
    token: int, logit: float, params: SamplingParams, history: TokenHistory, stop_ids: Sequence[int]
) -> float:
    if len(history.output) < params.min_tokens and token in (*stop_ids, *params.stop_token_ids):
        return -math.inf
    logit += params.logit_bias.get(token, 0.0)
    if token in history.prompt or token in history.output:
        logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    times = list(history.output).count(token)
    return logit - params.frequency_penalty * times - params.presence_penalty * (times > 0)


# --- the checks -------------------------------------------------------------------------------------------------


def check_rows(
    process: Process, logits_TV: torch.Tensor, params: SamplingParams, rows: list[TokenHistory]
) -> None:
    """`process` gives the oracle's probabilities to 1e-12, and excludes what the oracle excludes."""
    before_TV = logits_TV.clone()
    logprobs_TV = process(logits_TV, params, rows, (EOS,))
    assert torch.equal(logits_TV, before_TV), "the model's logits were written into"
    assert logprobs_TV.dtype == torch.float64
    for row, history in enumerate(rows):
        expected = slow_probabilities(logits_TV[row].tolist(), params, history, (EOS,))
        found = logprobs_TV[row].exp().tolist()
        assert len(found) == len(expected)
        for token, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert abs(one - other) <= 1e-12, (params, token, one, other)
            assert (one == 0) == (other == 0), (params, token, one, other)


def some_rows(seed: int, scale: float = 3.0) -> tuple[torch.Tensor, list[TokenHistory]]:
    """Logits of both signs, with histories that repeat themselves; one output is still empty."""
    draw = random.Random(seed)
    logits = [[draw.gauss(0, scale) for _ in range(VOCAB)] for _ in OUTPUT_LENGTHS]
    rows = [
        TokenHistory(draw.choices(range(VOCAB), k=6), draw.choices(range(VOCAB), k=length))
        for length in OUTPUT_LENGTHS
    ]
    return torch.tensor(logits, dtype=torch.float64), rows


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
    """Every combination of every parameter on and off."""
    for number, values in enumerate(itertools.product(*CHOICES.values())):
        chosen = dict(zip(CHOICES, values, strict=True))
        if chosen["temperature"] == 0 and (chosen["top_p"], chosen["top_k"], chosen["min_p"]) != (
            1.0,
            0,
            0.0,
        ):
            continue  # refused: a greedy sampler has nothing to cut off
        params = SamplingParams(**chosen, max_tokens=8, stop_token_ids=(5, 9))
        logits_TV, rows = some_rows(number)
        check_rows(process, logits_TV, params, rows)


def check_sampling(draw: Draw, draws: int) -> None:
    """Frequencies along positions, samples and seeds fit the processed distribution; nothing excluded is drawn."""
    params = SamplingParams(temperature=0.8, top_p=0.97, repetition_penalty=1.2, logit_bias={3: 2.0})
    logits_TV, rows = some_rows(seed=1, scale=1.0)
    logprobs_V = processing.processed_logprobs(logits_TV[1:2], params, rows[1:2])[0]
    expected = torch.tensor(
        slow_probabilities(logits_TV[1].tolist(), params, rows[1], ()), dtype=torch.float64
    )
    alive = expected > 0
    assert 10 < int(alive.sum()) < VOCAB
    for axis in range(3):
        counted = [0] * VOCAB
        for step in range(draws // 3):
            coordinates = [7, 1, 5]
            coordinates[axis] = step
            counted[draw(logprobs_V, *coordinates)] += 1
        counts = torch.tensor(counted, dtype=torch.float64)
        assert counts[~alive].sum() == 0, "a token of probability zero was drawn"
        fit = stats.chisquare(counts[alive], expected[alive] * counts.sum())
        assert fit.pvalue > 1e-5, (axis, fit)


# --- the real one -----------------------------------------------------------------------------------------------


def test_every_combination_equals_the_oracle() -> None:
    check_processing(processing.processed_logprobs)


@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.01, 1.0, 10.0]),
    params=st.builds(
        SamplingParams().with_in_force,
        temperature=st.one_of(st.just(0.0), st.floats(0.05, 4.0)),
        top_p=st.floats(0.05, 1.0),
        top_k=st.integers(0, VOCAB + 3),
        min_p=st.floats(0.0, 0.9),
        repetition_penalty=st.floats(0.3, 3.0),
        presence_penalty=st.floats(-2.0, 2.0),
        frequency_penalty=st.floats(-2.0, 2.0),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100.0, 100.0), max_size=4),
        max_tokens=st.just(10),
        min_tokens=st.integers(0, 10),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    ),
)
def test_any_values_equal_the_oracle(seed: int, scale: float, params: SamplingParams) -> None:
    logits_TV, rows = some_rows(seed, scale)
    check_rows(processing.processed_logprobs, logits_TV, params, rows)
    counted = processing.tally(rows, logits_TV)
    assert torch.equal(
        processing.processed_logprobs(logits_TV, params, rows, (EOS,), counted),
        processing.processed_logprobs(logits_TV, params, rows, (EOS,)),
    )


def real_draw(logprobs_V: torch.Tensor, seed: int, sample_index: int, position: int) -> int:
    return choose(logprobs_V, uniform(seed, sample_index, position))


def test_sampled_tokens_follow_the_distribution() -> None:
    check_sampling(real_draw, draws=100_000)


# --- planted bugs -----------------------------------------------------------------------------------------------

Step = Callable[[torch.Tensor, SamplingParams, Sequence[TokenHistory], Sequence[int]], torch.Tensor]


def forbid(logits_TV, params, rows, stop_ids, beyond=0):
    logits_TV = logits_TV.clone()
    for row, history in enumerate(rows):
        if len(history.output) < params.min_tokens + beyond:
            logits_TV[row, [*stop_ids, *params.stop_token_ids]] = -torch.inf
    return logits_TV


def bias(logits_TV, params, rows, stop_ids):
    values = [params.logit_bias.get(token, 0.0) for token in range(VOCAB)]
    return logits_TV + torch.tensor(values, dtype=logits_TV.dtype)


def penalise(logits_TV, params, rows, stop_ids):
    counts_TV = torch.zeros_like(logits_TV)
    seen_TV = torch.zeros_like(logits_TV)
    for row, history in enumerate(rows):
        for token in history.output:
            counts_TV[row, token] += 1
        seen_TV[row, [*history.prompt, *history.output]] = 1
    strength = params.repetition_penalty
    repeated_TV = torch.where(logits_TV > 0, logits_TV / strength, logits_TV * strength)
    logits_TV = torch.where(seen_TV > 0, repeated_TV, logits_TV) - params.frequency_penalty * counts_TV
    return logits_TV - params.presence_penalty * counts_TV.clamp(max=1)


def temper(logits_TV, params, rows, stop_ids):
    return logits_TV if params.greedy else logits_TV / params.temperature


def truncate(logits_TV, params, rows, stop_ids):
    return processing.truncate(logits_TV, params)


def normalise(logits_TV, params, rows, stop_ids):
    return logits_TV.log_softmax(-1)


def penalise_with_prompt_counted(logits_TV, params, rows, stop_ids):
    """Presence and frequency look at the prompt too."""
    rows = [TokenHistory(row.prompt, [*row.prompt, *row.output]) for row in rows]
    return penalise(logits_TV, params, rows, stop_ids)


def penalise_output_only(logits_TV, params, rows, stop_ids):
    """Repetition looks at the output alone."""
    return penalise(logits_TV, params, [TokenHistory((), row.output) for row in rows], stop_ids)


def penalise_once(logits_TV, params, rows, stop_ids):
    """Frequency counts every token once."""
    return penalise(logits_TV, params, [TokenHistory(row.prompt, [*{*row.output}]) for row in rows], stop_ids)


def penalise_in_fp32(logits_TV, params, rows, stop_ids):
    """A penalty that is rounded on its way."""
    rounded = float(torch.tensor(params.presence_penalty))
    params = msgspec.structs.replace(params, presence_penalty=rounded)
    return penalise(logits_TV, params, rows, stop_ids)


def forbid_one_longer(logits_TV, params, rows, stop_ids):
    """Off by one in the minimum length."""
    return forbid(logits_TV, params, rows, stop_ids, beyond=1)


def forbid_own_only(logits_TV, params, rows, stop_ids):
    """The model's own end is not forbidden."""
    return forbid(logits_TV, params, rows, ())


def with_top_p(moved: int) -> Step:
    """The nucleus is `moved` tokens larger."""

    def step(logits_TV, params, rows, stop_ids):
        right_TV = truncate(logits_TV, params, rows, stop_ids)
        if params.top_p == 1:
            return right_TV
        whole_TV = processing.truncate(logits_TV, SamplingParams(min_p=params.min_p, top_k=params.top_k))
        wrong_TV = torch.full_like(logits_TV, -torch.inf)
        for row in range(len(logits_TV)):
            size = max(1, int((right_TV[row] > -torch.inf).sum()) + moved)
            order = whole_TV[row].argsort(descending=True)[:size]
            wrong_TV[row, order] = whole_TV[row, order]
        return wrong_TV

    return step


def top_p_before_top_k(logits_TV, params, rows, stop_ids):
    logits_TV = processing.truncate(logits_TV, SamplingParams(top_p=params.top_p, min_p=params.min_p))
    return processing.truncate(logits_TV, SamplingParams(top_k=params.top_k))


def unnormalised(logits_TV, params, rows, stop_ids):
    """Truncation after the softmax: what is left does not sum to one."""
    return truncate(logits_TV.log_softmax(-1), params, rows, stop_ids)


def certain_when_greedy(logits_TV, params, rows, stop_ids):
    logprobs_TV = logits_TV.log_softmax(-1)
    if params.greedy:
        logprobs_TV = logprobs_TV.masked_fill(logprobs_TV < logprobs_TV.amax(-1, keepdim=True), -torch.inf)
        return logprobs_TV.log_softmax(-1)
    return logprobs_TV


def in_place(logits_TV, params, rows, stop_ids):
    return logits_TV.add_(1.0)


def chain(*steps: Step) -> Process:
    def process(logits_TV, params, rows, stop_ids):
        for step in steps:
            logits_TV = step(logits_TV, params, rows, stop_ids)
        return logits_TV

    return process


PLANTED_STEPS = {
    "temperature before penalties": (forbid, bias, temper, penalise, truncate, normalise),
    "temperature after truncation": (forbid, bias, penalise, truncate, temper, normalise),
    "bias after penalties": (forbid, penalise, bias, temper, truncate, normalise),
    "no bias": (forbid, penalise, temper, truncate, normalise),
    "presence counts the prompt": (forbid, bias, penalise_with_prompt_counted, temper, truncate, normalise),
    "repetition without the prompt": (forbid, bias, penalise_output_only, temper, truncate, normalise),
    "penalty in fp32": (forbid, bias, penalise_in_fp32, temper, truncate, normalise),
    "frequency counts once": (forbid, bias, penalise_once, temper, truncate, normalise),
    "minimum length off by one": (forbid_one_longer, bias, penalise, temper, truncate, normalise),
    "end of sequence not forbidden": (forbid_own_only, bias, penalise, temper, truncate, normalise),
    "top-p one token too many": (forbid, bias, penalise, temper, with_top_p(1), normalise),
    "top-p one token too few": (forbid, bias, penalise, temper, with_top_p(-1), normalise),
    "top-p before top-k": (forbid, bias, penalise, temper, top_p_before_top_k, normalise),
    "not renormalised": (forbid, bias, penalise, temper, unnormalised),
    "greedy is certain": (forbid, bias, penalise, temper, truncate, certain_when_greedy),
    "logits written into": (in_place, forbid, bias, penalise, temper, truncate, normalise),
}


def test_the_steps_by_themselves_are_right() -> None:
    check_processing(chain(forbid, bias, penalise, temper, truncate, normalise))


@pytest.mark.parametrize("name", PLANTED_STEPS)
def test_a_planted_bug_in_processing_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        check_processing(chain(*PLANTED_STEPS[name]))


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


@given(st.integers(0, 2**32), st.floats(0.01, 0.999), st.sampled_from([0.01, 1.0, 3.0, 30.0]))
def test_the_short_way_to_a_nucleus_ends_where_sorting_does(seed: int, top_p: float, width: float) -> None:
    # Narrow rows have a nucleus beyond the short way, whole numbers have equals at its edge, one row is top-k's.
    generator = torch.Generator().manual_seed(seed)
    logits_TV = width * torch.randn(5, 3 * processing.NUCLEUS, generator=generator, dtype=torch.float64)
    logits_TV[1] = logits_TV[1].round()
    logits_TV[2, 7:] = -torch.inf
    logits_TV[3, 100] = 60 * width
    logits_TV[4] = torch.nan
    found_TV = processing.truncate(logits_TV, SamplingParams(top_p=top_p))
    expected_TV = torch.stack([processing._top_p_of_all(row_V[None], top_p)[0] for row_V in logits_TV])
    assert torch.equal(found_TV.isneginf(), expected_TV.isneginf())
    assert torch.equal(found_TV.nan_to_num(), expected_TV.nan_to_num())
