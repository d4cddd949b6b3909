from typing import Any

import pytest

from zerodrift.config.keys import RETIRED, check_keys, fields
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError, RetiredKey, UnknownKey


def refusal(values: dict[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_keys(values, RunConfig, "run.yaml")
    return str(caught.value)


def test_known_keys_pass():
    gates = {"gates": {"k3": "not checked here"}}
    check_keys({"engine": {"block_size": 1}, "validation": gates}, RunConfig, "x")


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        (
            {"engine": {"blok_size": 1}},
            "section 'engine' has no key 'blok_size'; did you mean engine.block_size?",
        ),
        ({"validation": {"gates": {"k33": 1}}}, "did you mean validation.gates.k3?"),
        ({"model": {"block_size": 1}}, "did you mean engine.block_size?"),
        ({"k3": 1}, "did you mean validation.gates.k3?"),
        ({"monitoring": {"max_model_len": 1}}, "did you mean model.max_model_len or engine.max_model_len?"),
        ({"zzz": 1}, "the top level has no key 'zzz'; its keys are model, engine, sampling_defaults, "),
        ({"validation": {"gates": {"zzz": 1}}}, "its keys are mean_abs, p90_abs, k3"),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(values, hint):
    with pytest.raises(UnknownKey):
        check_keys(values, RunConfig, "run.yaml")
    assert hint in refusal(values)


@pytest.mark.parametrize("key", [1, None, True, "engine.name", ""])
def test_odd_keys_are_refused(key):
    assert f"no key {key!r}" in refusal({key: 1})


@pytest.mark.parametrize("value", [None, 1, "text", [1]])
def test_a_section_must_hold_keys(value):
    assert "engine is" in refusal({"engine": value})
    assert "validation.gates is" in refusal({"validation": {"gates": value}})


@pytest.mark.parametrize("key", RETIRED)
def test_retired_keys_are_refused_wherever_they_stand_and_none_is_in_use(key):
    for values in ({key: 4}, {"engine": {key: 4}}, {"model": {key: 4}}):
        with pytest.raises(RetiredKey):
            check_keys(values, RunConfig, "run.yaml")
    assert key not in {field.path.rpartition(".")[2] for field in fields(RunConfig)}
