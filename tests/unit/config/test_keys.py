from typing import Any

import pytest

from zerodrift.config.keys import RETIRED, check_keys, fields
from zerodrift.config.run import RunConfig
from zerodrift.core.errors import ConfigError, RetiredKey, UnknownKey


def refusal(values: dict[Any, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_keys(values, RunConfig, "run.yaml")
    return str(caught.value)


def test_known_keys_pass() -> None:
    check_keys(
        {"engine": {"block_size": 1}, "validation": {"gates": {"k3": "not checked here"}}}, RunConfig, "x"
    )


def test_a_typo_names_file_section_and_the_key_that_was_meant() -> None:
    with pytest.raises(UnknownKey):
        check_keys({"engine": {"blok_size": 1}}, RunConfig, "run.yaml")
    assert refusal({"engine": {"blok_size": 1}}) == (
        "run.yaml: section 'engine' has no key 'blok_size'; did you mean engine.block_size?"
    )


def test_a_typo_in_a_section_of_a_section() -> None:
    assert "section 'validation.gates' has no key 'k33'; did you mean validation.gates.k3?" in refusal(
        {"validation": {"gates": {"k33": 1}}}
    )


def test_a_key_in_the_wrong_section_names_the_right_one() -> None:
    assert "did you mean engine.block_size?" in refusal({"model": {"block_size": 1}})
    assert "did you mean validation.gates.k3?" in refusal({"k3": 1})
    both = refusal({"monitoring": {"max_model_len": 1}})
    assert "did you mean model.max_model_len or engine.max_model_len?" in both


def test_where_nothing_is_near_all_keys_are_listed() -> None:
    assert "the top level has no key 'zzz'; its keys are model, engine, sampling_defaults, " in refusal(
        {"zzz": 1}
    )
    assert "its keys are mean_abs, p90_abs, k3" in refusal({"validation": {"gates": {"zzz": 1}}})


@pytest.mark.parametrize("key", [1, None, True, "engine.name", ""])
def test_odd_keys_are_refused(key: object) -> None:
    assert f"no key {key!r}" in refusal({key: 1})


@pytest.mark.parametrize("value", [None, 1, "text", [1]])
def test_a_section_must_hold_keys(value: object) -> None:
    assert "engine is" in refusal({"engine": value})
    assert "validation.gates is" in refusal({"validation": {"gates": value}})


@pytest.mark.parametrize("key", RETIRED)
@pytest.mark.parametrize("section", ["engine", "model", None])
def test_retired_keys_say_why_and_what_to_do(key: str, section: str | None) -> None:
    values = {key: 4} if section is None else {section: {key: 4}}
    with pytest.raises(RetiredKey):
        check_keys(values, RunConfig, "run.yaml")


def test_no_retired_key_is_in_use() -> None:
    assert not {field.path.rpartition(".")[2] for field in fields(RunConfig)} & set(RETIRED)
