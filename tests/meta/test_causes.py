"""Causes are what a user reads: each must say what it is, and what to type."""

import re

import pytest

from zerodrift.core.cause import ANY_ENGINE, CAUSES, Cause, Layer


@pytest.mark.parametrize("cause", CAUSES.values(), ids=list(CAUSES))
def test_a_cause_is_complete(cause: Cause) -> None:
    assert cause.layer in Layer
    assert re.fullmatch(r"unexplained|[a-z]+/[a-z-]+", cause.name)
    assert cause.says[0].isupper()
    assert cause.says.endswith(".")
    assert cause.fixes[ANY_ENGINE]
    assert cause.fix("an engine that nobody knows") == cause.fixes[ANY_ENGINE]
    assert all(fix == fix.strip() and not fix.endswith(".") for fix in cause.fixes.values())


def test_names_are_keys_and_sentences_differ() -> None:
    assert all(name == cause.name for name, cause in CAUSES.items())
    assert len({cause.says for cause in CAUSES.values()}) == len(CAUSES)


def test_only_the_unexplained_has_no_layer() -> None:
    assert [name for name, cause in CAUSES.items() if cause.layer is Layer.NONE] == ["unexplained"]


def test_a_fix_for_an_engine_is_preferred() -> None:
    assert CAUSES["semantic/raw-logprobs"].fix("vllm") == "--logprobs-mode processed_logprobs"
