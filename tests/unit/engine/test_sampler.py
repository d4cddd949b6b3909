import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerodrift.core.completion import LogprobKind, Problem
from zerodrift.core.request import SamplingParams
from zerodrift.engine.plan import Draw, Drawn
from zerodrift.engine.sampler import LogprobsMode, Sampler, invert
from zerodrift.sampler.choose import choose
from zerodrift.sampler.noise import uniform
from zerodrift.sampler.prefix import Prefix
from zerodrift.sampler.processing import TokenHistory, processed_logits, processed_logprobs

V = 40


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def draw(
    key: int,
    params: SamplingParams,
    output: list[int] | None = None,
    index: int = 0,
    forced: int | None = None,
) -> Draw:
    return Draw(key, params, index, (1, 2, 3), Prefix(output or [], len(output or [])), forced)


PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2),
    SamplingParams(seed=3, temperature=0.5, top_k=5, logprobs=3),
    SamplingParams(seed=4, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(
        seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={4: 2.0}
    ),
    SamplingParams(seed=6, min_tokens=2, stop_token_ids=(9,)),
]


@given(st.lists(st.integers(0, len(PARAMS) - 1), min_size=1, max_size=12), st.integers(0, 100))
def test_rows_drawn_together_are_rows_drawn_alone(choices: list[int], seed: int) -> None:
    logits_RV = logits(len(choices), seed)
    sampler = Sampler(LogprobsMode.PROCESSED_LOGPROBS, [7])
    rows = [[draw(key, PARAMS[choice], [4, 5, 4])] for key, choice in enumerate(choices)]
    together = sampler.draw(logits_RV, rows)
    for key, row in enumerate(rows):
        assert together[key] == sampler.draw(logits_RV[key : key + 1], [row])[key]


@pytest.mark.parametrize("params", PARAMS)
def test_a_token_is_what_choose_gives(params: SamplingParams) -> None:
    """For one sample and for several of one row, as the reference does it."""
    logits_RV, history = logits(5), TokenHistory((1, 2, 3), [4])
    sampler = Sampler(LogprobsMode.PROCESSED_LOGPROBS, [7])
    samples = range(1) if params.greedy else range(3)
    drawn = sampler.draw(
        logits_RV, [[draw(10 * row + index, params, [4], index) for index in samples] for row in range(5)]
    )
    for row in range(5):
        expected_V = processed_logprobs(logits_RV[row : row + 1], params, [history], [7])[0]
        for index in samples:
            one = drawn[10 * row + index]
            assert isinstance(one, Drawn)
            token = (
                int(expected_V.argmax())
                if params.greedy
                else choose(expected_V, uniform(params.seed or 0, index, 1))
            )
            assert one.token_id == token
            assert one.logprob == float(expected_V[token])
            best = expected_V.topk(params.logprobs or 1)
            assert (
                one.alternatives
                == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))[
                    : params.logprobs or 0
                ]
            )
            finite = expected_V[expected_V.isfinite()].double()
            assert one.entropy == pytest.approx(float(-(finite.exp() * finite).sum()), abs=1e-5)


def test_rows_with_different_numbers_of_samples() -> None:
    sampler, params = Sampler(LogprobsMode.PROCESSED_LOGPROBS, []), SamplingParams(seed=1)
    logits_RV = logits(2)
    drawn = sampler.draw(logits_RV, [[draw(0, params, index=0), draw(1, params, index=1)], [draw(2, params)]])
    for key, (row, index) in enumerate([(0, 0), (0, 1), (1, 0)]):
        assert drawn[key] == sampler.draw(logits_RV[row : row + 1], [[draw(key, params, index=index)]])[key]


@given(st.integers(0, 1000), st.sampled_from([0.1, 1.0, 4.0]), st.integers(1, 400))
def test_inversion_in_fp32_finds_what_fp64_finds(seed: int, spread: float, vocabulary: int) -> None:
    """Also on the ends of slices, where only fp64 can tell."""
    generator = torch.Generator().manual_seed(seed)
    logprobs_GV = torch.log_softmax(torch.randn(3, vocabulary, generator=generator) * spread, dim=-1)
    logprobs_GV[:, ::7] = -torch.inf if vocabulary > 7 else logprobs_GV[:, ::7]
    ends_V = logprobs_GV[0].double().exp().cumsum(0)
    edges = (ends_V / ends_V[-1]).tolist()[:20]
    drawn = torch.rand(10, generator=generator, dtype=torch.float64).tolist()
    near = [value + step for value in edges for step in (-1e-9, 0.0, 1e-16, 1e-9, 5e-7, 2e-6)]
    uniforms = [value for value in (*drawn, *near, 0.0, 1 - 2**-53) if 0 <= value < 1]
    for row in range(3):
        found = invert(logprobs_GV, logprobs_GV.exp(), [row] * len(uniforms), uniforms)
        assert found == [choose(logprobs_GV[row], value) for value in uniforms]


@pytest.mark.parametrize("mode", LogprobsMode)
def test_four_modes(mode: LogprobsMode) -> None:
    params = SamplingParams(seed=1, temperature=0.5, top_k=3, logprobs=5)
    logits_1V, history = logits(1), [TokenHistory((1, 2, 3), [])]
    one = Sampler(mode, []).draw(logits_1V, [[draw(0, params)]])[0]
    assert isinstance(one, Drawn)
    raw_V = torch.log_softmax(logits_1V, dim=-1)[0]
    processed_V = processed_logprobs(logits_1V, params, history)[0]
    expected_V = raw_V if mode.kind is LogprobKind.RAW else processed_V
    assert one.logprob == float(expected_V[one.token_id])
    assert len(one.alternatives) == (5 if mode.kind is LogprobKind.RAW else 3)
    if mode is LogprobsMode.RAW_LOGITS:
        assert one.logit == float(logits_1V[0, one.token_id])
        assert len(one.top_logits) == 5
    elif mode is LogprobsMode.PROCESSED_LOGITS:
        assert one.logit == float(processed_logits(logits_1V, params, history)[0, one.token_id])
        assert one.logit == float(logits_1V[0, one.token_id] / 0.5)
        assert len(one.top_logits) == 3
    else:
        assert one.logit is None
        assert one.top_logits == ()


def test_a_forced_token_is_taken_and_its_neighbour_drawn() -> None:
    params = SamplingParams(seed=1)
    logits_RV = logits(2)
    sampler = Sampler(LogprobsMode.PROCESSED_LOGPROBS, [])
    drawn = sampler.draw(logits_RV, [[draw(0, params, forced=17)], [draw(1, params)]])
    one, other = drawn[0], drawn[1]
    assert isinstance(one, Drawn)
    assert one.token_id == 17
    assert one.logprob == float(torch.log_softmax(logits_RV, -1)[0, 17])
    assert other == sampler.draw(logits_RV[1:], [[draw(1, params)]])[1]
    assert sampler.draw(logits_RV[:1], [[draw(0, params, forced=17)]])[0] == one


def test_a_forced_token_that_cannot_be_drawn_is_a_problem() -> None:
    logits_1V = logits(1)
    worst = int(logits_1V.argmin())
    params = SamplingParams(seed=1, top_k=1)
    problem = Sampler(LogprobsMode.PROCESSED_LOGPROBS, []).draw(logits_1V, [[draw(0, params, forced=worst)]])[
        0
    ]
    assert isinstance(problem, Problem)
    assert problem.code == "value/sampling"
    assert f"was forced to be {worst}" in problem.message
    # Its raw logprob exists, and in that mode it is what is asked for.
    assert isinstance(
        Sampler(LogprobsMode.RAW_LOGPROBS, []).draw(logits_1V, [[draw(0, params, forced=worst)]])[0], Drawn
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_a_problem_of_its_own(bad: float) -> None:
    params, sampler = SamplingParams(seed=1, top_p=0.9), Sampler(LogprobsMode.PROCESSED_LOGPROBS, [])
    logits_RV = logits(3)
    rows = [[draw(key, params)] for key in range(3)]
    clean = sampler.draw(logits_RV, rows)
    logits_RV[1, 5] = bad
    drawn = sampler.draw(logits_RV, rows)
    problem = drawn[1]
    assert isinstance(problem, Problem)
    assert problem.code == "value/non-finite"
    assert (drawn[0], drawn[2]) == (clean[0], clean[2])


def test_parameters_that_forbid_every_token_are_a_problem_of_their_own() -> None:
    everything = SamplingParams(seed=1, min_tokens=1, stop_token_ids=tuple(range(V)))
    sampler = Sampler(LogprobsMode.PROCESSED_LOGPROBS, [])
    drawn = sampler.draw(logits(2), [[draw(0, everything)], [draw(1, SamplingParams(seed=1))]])
    assert isinstance(drawn[0], Problem)
    assert "forbids every token" in drawn[0].message
    assert isinstance(drawn[1], Drawn)


def test_scores_are_raw_logprobs() -> None:
    logits_RV = logits(3)
    scored = Sampler(LogprobsMode.PROCESSED_LOGPROBS, []).score(logits_RV, [1, 2, 3], top=2)
    expected_RV = torch.log_softmax(logits_RV, -1)
    assert [one.logprob for one in scored] == [float(expected_RV[row, row + 1]) for row in range(3)]
    assert scored[0].alternatives[0] == (int(expected_RV[0].argmax()), float(expected_RV[0].max()))


def test_parameters_that_do_not_shape_a_row_do_not_split_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 requests with seeds of their own are one group: anything else is 256 passes over the vocabulary."""
    calls = []
    original = Sampler._draw_group
    monkeypatch.setattr(Sampler, "_draw_group", lambda self, *rest: (calls.append(1), original(self, *rest)))
    base = SamplingParams(temperature=0.7, seed=0)
    rows = [[draw(key, msgspec.structs.replace(base, seed=key, max_tokens=key + 1, n=1))] for key in range(8)]
    Sampler(LogprobsMode.PROCESSED_LOGPROBS, []).draw(logits(8), rows)
    assert len(calls) == 1
