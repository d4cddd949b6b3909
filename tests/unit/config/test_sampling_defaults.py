import msgspec
import pytest

from zerodrift.config.sampling_defaults import SamplingDefaults
from zerodrift.core.errors import InvalidSampling
from zerodrift.core.request import SamplingParams

OF_ONE_REQUEST = {"logit_bias", "seed", "n", "prompt_logprobs"}


def test_every_parameter_is_shared_or_belongs_to_one_request() -> None:
    shared = set(SamplingDefaults.__struct_fields__)
    assert shared | OF_ONE_REQUEST == set(SamplingParams.__struct_fields__)
    assert not shared & OF_ONE_REQUEST


def test_defaults_are_those_of_a_request() -> None:
    assert SamplingDefaults().params() == SamplingParams()


def test_values_reach_the_request() -> None:
    values = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ("end",),
        "stop_token_ids": (3,),
        "ignore_eos": True,
        "logprobs": 4,
    }
    assert set(values) == set(SamplingDefaults.__struct_fields__)
    params = msgspec.structs.asdict(SamplingDefaults(**values).params())  # type: ignore[arg-type]
    assert {name: params[name] for name in values} == values


def test_the_rules_of_a_request_hold() -> None:
    with pytest.raises(InvalidSampling):
        SamplingDefaults(top_p=0)
    with pytest.raises(InvalidSampling):
        SamplingDefaults(min_tokens=17)
