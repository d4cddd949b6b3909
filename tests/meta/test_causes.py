"""Causes are what a user reads: each must say what it is, and what to type."""

import re

import pytest

from zerodrift.core.cause import ANY_ENGINE, CAUSES, Cause, Layer


@pytest.mark.parametrize("cause", CAUSES.values(), ids=list(CAUSES))
def test_a_cause_is_complete(cause: Cause) -> None:
    assert cause.layer in Layer
    assert re.fullmatch(r"unexplained|[a-z]+/[a-z-]+", cause.name)
    assert cause.message[0].isupper()
    assert cause.message.endswith(".")
    assert cause.fixes[ANY_ENGINE]
    assert cause.fix("an engine that nobody knows") == cause.fixes[ANY_ENGINE]
    assert all(fix == fix.strip() and not fix.endswith(".") for fix in cause.fixes.values())


VOCABULARY = {
    Layer.SEMANTIC: "raw-logprobs temperature truncation-mass penalty logit-bias generation-config off-by-one "
    "wrong-token nonfinite bos template tokenizer retokenised eos seed misbound-output misbound-logprobs "
    "notation padding streaming sampling-bias",
    Layer.PATH: "head-precision body-precision weight-quantisation kv-precision routing parallelism spec-decode "
    "batch-variance prefill-decode chunked-prefill prefix-cache preemption rope window context-boundary "
    "nondeterminism kv-heads mask",
    Layer.WEIGHTS: "stale other-model partial rows fraction multiple swapped dtype tied-head buffer torn version-label "
    "stale-prefix-cache replica lora",
    Layer.TRAINER: "packing autocast precision micro-batch positions",
    Layer.OBJECTIVE: "staleness sequence-ratio reward-misbound",
}


def test_the_vocabulary_is_closed() -> None:
    """Names stand in verdicts that others compare by machine: one more or one fewer is a decision, not an edit."""
    wanted = {f"{layer}/{word}" for layer, words in VOCABULARY.items() for word in words.split()}
    assert set(CAUSES) == wanted | {"unexplained"}
    with pytest.raises(TypeError, match="frozen"):
        CAUSES["path/weather"] = CAUSES["unexplained"]  # type: ignore[index]


def test_names_are_keys_and_sentences_differ() -> None:
    assert all(name == cause.name for name, cause in CAUSES.items())
    assert len({cause.message for cause in CAUSES.values()}) == len(CAUSES)


def test_only_the_unexplained_has_no_layer() -> None:
    assert [name for name, cause in CAUSES.items() if cause.layer is Layer.NONE] == ["unexplained"]


def test_a_fix_for_an_engine_is_preferred() -> None:
    assert CAUSES["semantic/raw-logprobs"].fix("vllm") == "--logprobs-mode processed_logprobs"


def test_a_layer_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="weather"):
        _ = Cause("weather/rain", "Wet.", {ANY_ENGINE: "coat"}).layer
