import math
from array import array
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import InvalidPrompt, InvalidSampling
from zerodrift.core.request import MAX_SEED, SHAPING, Prompt, Request, SamplingParams

NO_IDS = [
    (),
    [],
    (3, -1),
    (True,),
    (1.0,),
    ["1"],
    "text",
    b"text",
    np.array([1]),
    list(np.array([1])),
    {1: 2},
    None,
]


@pytest.mark.parametrize("ids", NO_IDS, ids=str)
def test_an_impossible_prompt(ids):
    with pytest.raises(InvalidPrompt) as caught:
        Prompt(ids)
    assert caught.value.code == "value/prompt"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("ids", [(1, 2), [1, 2], range(1, 3), deque((1, 2)), array("q", (1, 2))])
def test_ids_may_come_as_any_sequence_of_ints(ids):
    assert Prompt(ids).token_ids == (1, 2)


def test_a_request_is_a_prompt_and_parameters():
    with pytest.raises(InvalidPrompt):
        Request((1, 2))
    with pytest.raises(InvalidSampling):
        Request(Prompt((1,)), None)
    for name in ("text", "cache_salt"):
        with pytest.raises(InvalidPrompt):
            Prompt((1,), **{name: 5})


def test_ids_beyond_the_vocabulary():
    Prompt((0, 511)).check_vocabulary(512)
    with pytest.raises(InvalidPrompt):
        Prompt((0, 512)).check_vocabulary(512)


IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, math.nan, math.inf, "1", True, None, 0.001, 5e-324),
    "top_p": (0, 1.01, -0.5, math.nan),
    "top_k": (-1, 1.5, False),
    "min_p": (1, 1.5, -1e-09),
    "repetition_penalty": (0, -1.2, math.inf),
    "presence_penalty": (2.1,),
    "frequency_penalty": (-2.1, math.nan),
    "logit_bias": ({-1: 1.0}, {"7": 1.0}, {7: 101}, {7: -math.inf}, None, [1, 2]),
    "n": (0, "2"),
    "max_tokens": (0, None),
    "min_tokens": (-1, 17),
    "stop": ("end", ("",), (5,), None),
    "stop_token_ids": (2, (-2,), ("2",)),
    "ignore_eos": ("no",),
    "logprobs": (-1, True),
    "prompt_logprobs": (-2,),
    "seed": (-1, MAX_SEED + 1, 1.0),
}
NOTHING_TO_CUT: list[dict[str, Any]] = [{"n": "2"}, {"n": 2}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}]
REFUSED = [{name: value} for name, values in IMPOSSIBLE.items() for value in values]
REFUSED += [{"temperature": 0, **options} for options in NOTHING_TO_CUT]


@pytest.mark.parametrize("options", REFUSED, ids=lambda value: str(value)[:40])
def test_impossible_sampling(options):
    """Made so, or changed so; the message names the parameter."""
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**options)
    assert caught.value.code == "value/sampling"
    assert any(name in str(caught.value) for name in options)
    with pytest.raises(InvalidSampling):
        msgspec.structs.replace(SamplingParams(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.01},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 0.999},
        {"top_k": 10**6},
        {"repetition_penalty": 1e-3},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 5: 100}},
        {"min_tokens": 16},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"logprobs": None},
        {"stop": ["a", "b"], "stop_token_ids": [1, 2]},
    ],
    ids=str,
)
def test_the_ends_of_every_range_are_allowed(options):
    SamplingParams(**options)


def test_sequences_and_mappings_are_copied():
    stop, ids, bias = ["x"], [4], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("y")
    ids.append(5)
    bias[2] = 3.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (4,), {1: 2.0})


def test_an_unknown_parameter_is_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        msgspec.json.decode(b'{"best_of": 3}', type=SamplingParams)


def test_parameters_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0


@pytest.mark.parametrize(
    ("options", "does"),
    [
        ({"temperature": 0.9}, ""),
        ({"top_p": 0.9}, "truncates"),
        ({"top_k": 3}, "truncates"),
        ({"min_p": 0.1}, "truncates"),
        ({"repetition_penalty": 0.9}, "penalises"),
        ({"presence_penalty": 0.1}, "penalises"),
        ({"frequency_penalty": -0.1}, "penalises"),
        ({"logit_bias": {1: 1.0}}, ""),
        ({"min_tokens": 1}, ""),
    ],
)
def test_what_changes_the_distribution(options, does):
    assert set(options) <= set(SHAPING)
    params = SamplingParams(**options)
    assert not params.own_distribution
    assert params.shape != SamplingParams().shape
    assert [name for name in ("greedy", "truncates", "penalises") if getattr(params, name)] == does.split()


def test_what_does_not():
    assert SamplingParams(temperature=0).greedy
    for options in ({}, {"temperature": 0}, {"seed": 4, "n": 1, "max_tokens": 3, "stop_token_ids": (5,)}):
        assert SamplingParams(**options).own_distribution


def test_a_greedy_sampler_has_nothing_to_cut_off():
    """What an engine does that finds defaults for what a greedy request left out."""
    greedy, warm = SamplingParams(temperature=0), SamplingParams(temperature=0.7)
    cut = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}
    assert greedy.with_in_force(**cut) == greedy
    assert greedy.with_in_force(**cut, presence_penalty=1.0) == SamplingParams(
        temperature=0, presence_penalty=1.0
    )
    assert warm.with_in_force(**cut) == SamplingParams(temperature=0.7, **cut)
    assert greedy.with_in_force(temperature=0.7, top_p=0.9) == warm.with_in_force(top_p=0.9)
    assert warm.with_in_force(top_p=0.9).with_in_force(temperature=0) == greedy


def test_parameters_that_the_model_cannot_follow():
    SamplingParams(logit_bias={511: 1.0}, stop_token_ids=(511,), min_tokens=3).check_vocabulary(512)
    for options in ({"logit_bias": {512: 1.0}}, {"stop_token_ids": (3, 600)}):
        with pytest.raises(InvalidSampling):
            SamplingParams(**options).check_vocabulary(512)


def test_a_decoder_reports_where_a_value_stood():
    document = b'{"prompt": {"token_ids": [1]}, "sampling": {"top_p": 7}}'
    with pytest.raises(
        msgspec.ValidationError, match=r"top_p is 7.0; it is a mass in .* - at `\$\.sampling`"
    ):
        msgspec.json.decode(document, type=Request)
