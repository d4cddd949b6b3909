import math
from array import array
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.core.errors import InvalidPrompt, InvalidSampling
from zerodrift.core.request import MAX_SEED, SHAPING, Prompt, Request, SamplingParams


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((), "the prompt is empty; a model needs at least one token, for example its BOS"),
        ([], "the prompt is empty"),
        ((3, -1), r"prompt\[1\] is -1; a token id is a non-negative int"),
        ((True,), r"prompt\[0\] is True"),
        ((1.0,), r"prompt\[0\] is 1.0"),
        (["1"], r"prompt\[0\] is '1'"),
        ("text", "prompt is a str; token ids travel as a tuple of ints"),
        (b"text", "prompt is a bytes; token ids travel"),
        (np.array([1]), r"prompt is a ndarray; .*\.tolist\(\)"),
        (list(np.array([1])), r"prompt\[0\] is (np\.int64\()?1"),
        ({1: 2}, "prompt is a dict"),
        (None, "prompt is a NoneType"),
    ],
)
def test_an_impossible_prompt(ids: Any, says: str) -> None:
    with pytest.raises(InvalidPrompt, match=says) as caught:
        Prompt(ids)
    assert caught.value.code == "value/prompt"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("ids", [(1, 2), [1, 2], range(1, 3), deque((1, 2)), array("q", (1, 2))])
def test_ids_may_come_as_any_sequence_of_ints(ids: Any) -> None:
    assert Prompt(ids).token_ids == (1, 2)


@pytest.mark.parametrize("name", ["text", "cache_salt"])
def test_text_and_salt_are_text(name: str) -> None:
    with pytest.raises(InvalidPrompt):
        Prompt((1,), **{name: 5})  # type: ignore[arg-type]


def test_a_request_is_a_prompt_and_parameters() -> None:
    with pytest.raises(InvalidPrompt):
        Request((1, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidSampling):
        Request(Prompt((1,)), None)  # type: ignore[arg-type]


def test_a_list_of_ids_is_kept_as_a_tuple() -> None:
    ids = [1, 2]
    prompt = Prompt(ids)
    ids.append(3)
    assert prompt.token_ids == (1, 2)


def test_ids_beyond_the_vocabulary() -> None:
    Prompt((0, 511)).check_vocabulary(512)
    with pytest.raises(InvalidPrompt):
        Prompt((0, 512)).check_vocabulary(512)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature is -0.1; use 0 for greedy or a positive number"),
    ({"temperature": math.nan}, "temperature is nan, which is not a finite number"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": None}, "temperature is None"),
    ({"temperature": 0.001}, "temperature is 0.001; below 0.01 logits overflow: use 0"),
    ({"temperature": 5e-324}, "use 0 for greedy decoding"),
    ({"top_p": 0}, "top_p is 0, which keeps no token; use temperature=0"),
    ({"top_p": 1.01}, r"top_p is 1.01; it is a mass in \(0, 1\]"),
    ({"top_p": -0.5}, "top_p is -0.5"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"top_k": -1}, "top_k is -1; it is a count; 0 keeps every token"),
    ({"top_k": 1.5}, "top_k is 1.5, which is not an integer"),
    ({"top_k": False}, "top_k is False"),
    ({"min_p": 1}, "min_p is 1, which keeps only ties of the likeliest token; use temperature=0"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"min_p": -1e-9}, r"min_p is -1e-09; it is a fraction in \[0, 1\)"),
    (
        {"repetition_penalty": 0},
        "repetition_penalty is 0; it divides logits, so it must be positive; 1 is off",
    ),
    ({"repetition_penalty": -1.2}, "repetition_penalty is -1.2"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"presence_penalty": 2.1}, r"presence_penalty is 2.1; it lies in \[-2, 2\]; 0 is off"),
    ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
    ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias key is -1; it is a token id"),
    ({"logit_bias": {"7": 1.0}}, "logit_bias key is '7', which is not an integer"),
    ({"logit_bias": {7: 101}}, r"logit_bias\[7\] is 101; it lies in \[-100, 100\]"),
    ({"logit_bias": {7: -math.inf}}, r"logit_bias\[7\] is -inf"),
    ({"logit_bias": None}, "logit_bias is None; give a mapping"),
    ({"logit_bias": [1, 2]}, r"logit_bias is \[1, 2\]; give a mapping"),
    ({"n": 0}, "n is 0; ask for at least one sample"),
    ({"n": "2"}, "n is '2', which is not an integer"),
    ({"n": "2", "temperature": 0}, "n is '2', which is not an integer"),
    ({"n": 2, "temperature": 0}, "temperature 0 with n=2 gives 2 equal samples; use n=1"),
    (
        {"temperature": 0, "top_p": 0.5},
        "top_p is 0.5 at temperature 0, .* nothing to cut off: leave it at 1.0, or raise the temperature",
    ),
    ({"temperature": 0, "top_k": 3}, "top_k is 3 at temperature 0, .*: leave it at 0, or"),
    ({"temperature": 0, "min_p": 0.1}, "min_p is 0.1 at temperature 0, .*: leave it at 0.0, or"),
    ({"max_tokens": 0}, "max_tokens is 0; generate at least one token"),
    ({"max_tokens": None}, "max_tokens is None"),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"min_tokens": 17}, "min_tokens is 17; it counts tokens and cannot exceed max_tokens=16"),
    ({"stop": "end"}, "stop is 'end'; give a tuple"),
    ({"stop": ("",)}, r"stop is \(''.*; every stop string must be a non-empty string"),
    ({"stop": (5,)}, "every stop string must be a non-empty string"),
    ({"stop": None}, "stop is None; give a tuple"),
    ({"stop_token_ids": 2}, "stop_token_ids is 2; give a tuple"),
    ({"stop_token_ids": (-2,)}, r"stop_token_ids\[0\] is -2"),
    ({"stop_token_ids": ("2",)}, r"stop_token_ids\[0\] is '2'"),
    ({"ignore_eos": "no"}, "ignore_eos is 'no'; it is true or false"),
    ({"logprobs": -1}, "logprobs is -1; it counts alternatives; None reports nothing"),
    ({"logprobs": True}, "logprobs is True"),
    ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
    ({"seed": -1}, "seed is -1; it is a 63-bit count"),
    ({"seed": MAX_SEED + 1}, "seed is 9223372036854775808"),
    ({"seed": 1.0}, "seed is 1.0, which is not an integer"),
]


@pytest.mark.parametrize(("options", "says"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_impossible_sampling(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSampling, match=says) as caught:
        SamplingParams(**options)
    assert caught.value.code == "value/sampling"


@pytest.mark.parametrize(("options", "says"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_a_change_is_checked_as_a_construction_is(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSampling, match=says):
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
def test_the_ends_of_every_range_are_allowed(options: dict[str, Any]) -> None:
    SamplingParams(**options)


def test_sequences_and_mappings_are_copied() -> None:
    stop, ids, bias = ["x"], [4], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("y")
    ids.append(5)
    bias[2] = 3.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (4,), {1: 2.0})


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        msgspec.json.decode(b'{"best_of": 3}', type=SamplingParams)


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0


@pytest.mark.parametrize(
    ("options", "greedy", "truncates", "penalises"),
    [
        ({}, False, False, False),
        ({"temperature": 0}, True, False, False),
        ({"top_p": 0.9}, False, True, False),
        ({"top_k": 3}, False, True, False),
        ({"min_p": 0.1}, False, True, False),
        ({"repetition_penalty": 0.9}, False, False, True),
        ({"presence_penalty": 0.1}, False, False, True),
        ({"frequency_penalty": -0.1}, False, False, True),
        ({"logit_bias": {1: 1.0}}, False, False, False),
    ],
)
def test_what_parameters_do(options: dict[str, Any], greedy: bool, truncates: bool, penalises: bool) -> None:
    params = SamplingParams(**options)
    assert (params.greedy, params.truncates, params.penalises) == (greedy, truncates, penalises)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9},
        {"top_p": 0.9},
        {"top_k": 3},
        {"min_p": 0.1},
        {"repetition_penalty": 0.9},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {1: 1.0}},
        {"min_tokens": 1},
    ],
    ids=str,
)
def test_what_changes_the_distribution_is_listed(options: dict[str, Any]) -> None:
    assert set(options) <= set(SHAPING)
    assert not SamplingParams(**options).own_distribution
    assert SamplingParams(**options).shape != SamplingParams().shape


def test_what_does_not_is_not() -> None:
    for options in ({}, {"temperature": 0}, {"seed": 4, "n": 1, "max_tokens": 3, "stop_token_ids": (5,)}):
        assert SamplingParams(**options).own_distribution


def test_a_greedy_sampler_has_nothing_to_cut_off() -> None:
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"logit_bias": {512: 1.0}}, "logit_bias names token 512, but the model has 512 tokens"),
        ({"stop_token_ids": (3, 600)}, "stop_token_ids names token 600, but the model has 512 tokens"),
    ],
)
def test_parameters_that_the_model_cannot_follow(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSampling, match=says):
        SamplingParams(**options).check_vocabulary(512)


def test_parameters_that_the_model_can_follow() -> None:
    SamplingParams(logit_bias={511: 1.0}, stop_token_ids=(511,), min_tokens=3).check_vocabulary(512)


def test_a_decoder_reports_where_a_value_stood() -> None:
    document = b'{"prompt": {"token_ids": [1]}, "sampling": {"top_p": 7}}'
    with pytest.raises(
        msgspec.ValidationError, match=r"top_p is 7.0; it is a mass in .* - at `\$\.sampling`"
    ):
        msgspec.json.decode(document, type=Request)


def test_a_request_without_parameters_samples_the_model() -> None:
    params = Request(Prompt((1,))).sampling
    assert not any((params.greedy, params.truncates, params.penalises, params.logit_bias))
    assert params.temperature == 1
