import math
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.core.completion import (
    Answer,
    Completion,
    EngineFingerprint,
    FinishReason,
    LogprobContract,
    LogprobKind,
    Problem,
    TokenAlternative,
    check_logprobs,
)
from zerodrift.core.errors import (
    ContractViolation,
    InvalidCompletion,
    InvalidValue,
    NonFinite,
    ZerodriftError,
)
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion

OLD, NEW = WeightVersion("step-1"), WeightVersion("step-2")
HOLLOW, HIDDEN = TokenAlternative(2, math.nan), TokenAlternative(1, -9999.0)
IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "prompt_token_ids": ((), [1, 2], (1, -2)),
    "token_ids": ((3, 4, None), "abc"),
    "logprobs": (
        *((), (-1.0, -1.0), [-1.0, -1.0, -1.0]),
        *((-1.0, value, -1.0) for value in (0.001, None, "-1", False, np.float32(-1))),
    ),
    "versions": (
        *((), ("step-1",), (VersionSpan(OLD, 0, 2),), [VersionSpan(OLD, 0, 3)]),
        (VersionSpan(OLD, 0, 2), VersionSpan(NEW, 1, 3)),
    ),
    "lineage": (
        *((LineageSegment(OLD, 0, 5),), (LineageSegment(OLD, 0, 3),), (VersionSpan(OLD, 0, 4),)),
        (LineageSegment(OLD, 0, 2), LineageSegment(NEW, 3, 4)),
    ),
    "top_logprobs": (
        *(((),), ([], [], []), (((1, -1.0),), (), ())),
        ((TokenAlternative(-1, -1.0),), (), ()),
    ),
    "prompt_logprobs": ((None,), (None, None), (-1.0, -1.0)),
    "kind": ("raw",),
    "sampling": (None,),
    "finish_reason": ("bogus",),
    "fingerprint": (5,),
    "text": (b"x",),
    "sample_index": (-1,),
    "cached_tokens": (-1, 1.0),
}
NOT_FINITE: dict[str, tuple[Any, ...]] = {
    "logprobs": tuple((-1.0, value, -1.0) for value in (math.nan, -math.inf, math.inf, -9999.0)),
    "top_logprobs": tuple(((), (each,), ()) for each in (HOLLOW, HIDDEN, TokenAlternative(1, -math.inf))),
    "prompt_logprobs": ((None, math.nan),),
}


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (error, name, value)
        for error, found in ((InvalidCompletion, IMPOSSIBLE), (NonFinite, NOT_FINITE))
        for name, values in found.items()
        for value in values
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_impossible_completion(fields, name, value, error):
    with pytest.raises(ZerodriftError) as caught:
        Completion(**{**fields, name: value})
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logprobs": (-9997.9, -0.0, 1e-5)},
        {"versions": (VersionSpan(OLD, 0, 1), VersionSpan(NEW, 1, 3))},
        {"lineage": ()},
        {"lineage": (LineageSegment(OLD, 0, 3), LineageSegment(NEW, 3, 4))},
        {"prompt_logprobs": (None, -3.0)},
        {"cached_tokens": 0},
        {"cached_tokens": 2},
        {"top_logprobs": ((), (TokenAlternative(1, -1.0),), ())},
        {"sample_index": 3, "text": "abc"},
    ],
    ids=str,
)
def test_a_possible_completion(fields, changes):
    assert Completion(**{**fields, **changes}).sequence == (1, 2, 3, 4, 5)


def test_a_completion_of_nothing(fields):
    """An aborted request: no token, no version, and KV for the prompt or for none of it."""
    nothing = {"token_ids": (), "logprobs": (), "versions": (), "finish_reason": FinishReason.ABORT}
    for lineage in ((), (LineageSegment(OLD, 0, 2),)):
        assert Completion(**{**fields, **nothing, "lineage": lineage}).sequence == (1, 2)


def test_a_change_is_checked_as_a_construction_is(completion):
    with pytest.raises(NonFinite):
        msgspec.structs.replace(completion, logprobs=(math.nan,) * 3)


def test_a_decoder_refuses_it_too(completion):
    document = msgspec.json.encode(completion)
    assert msgspec.json.decode(document, type=Completion) == completion
    for bad in (document.replace(b"-1.5", b"-9999.0"), document.replace(b"-1.5", b"null")):
        assert bad != document
        with pytest.raises(msgspec.ValidationError, match="logprobs"):
            msgspec.json.decode(bad, type=Completion)


def test_unknown_fields_are_refused(completion):
    document = msgspec.json.encode({**msgspec.to_builtins(completion), "rank": 1})
    with pytest.raises(msgspec.ValidationError, match="rank"):
        msgspec.json.decode(document, type=Completion)


@pytest.mark.parametrize("value", [-9998.0, -9998.5, -9999.0, -1e5])
def test_numbers_that_stand_for_nan_are_refused(value):
    """-9999 in bf16 or after a subtraction is not quite -9999."""
    with pytest.raises(NonFinite):
        check_logprobs("logprobs", [value])
    check_logprobs("logprobs", [-9997.9])


def test_an_answer_is_made_of_completions_and_problems(completion):
    with pytest.raises(InvalidValue):
        Answer([completion])
    with pytest.raises(InvalidValue):
        Answer((), ("torn",))
    with pytest.raises(InvalidValue):
        Problem("value/invalid", None)


RAW, PROCESSED = LogprobKind.RAW, LogprobKind.PROCESSED
SHAPED: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": {1: 1.0}},
    {"min_tokens": 2},
]


@pytest.mark.parametrize("options", SHAPED, ids=str)
def test_what_a_softmax_cannot_reproduce_must_be_replayed(options):
    for kind in LogprobKind:
        with pytest.raises(ContractViolation):
            LogprobContract(kind, SamplingParams(**options))
        LogprobContract(kind, SamplingParams(**options), replays_processing=True)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"seed": 3, "stop_token_ids": (1,)}], ids=str)
def test_raw_logprobs_are_those_of_the_model_itself(options):
    LogprobContract(RAW, SamplingParams(**options))
    LogprobContract(PROCESSED, SamplingParams(**{"temperature": 0.7} | options))
    with pytest.raises(ContractViolation):
        LogprobContract(RAW, SamplingParams(temperature=0.7))


@pytest.mark.parametrize(
    "fields", [("raw", SamplingParams()), (RAW, None), (RAW, SamplingParams(), "yes")], ids=str
)
def test_a_contract_is_made_of_what_it_says(fields):
    with pytest.raises(ContractViolation):
        LogprobContract(*fields)


def fingerprint(**changes: Any) -> EngineFingerprint:
    parts = {"semantic": {"a": "1", "b": "2"}, "numeric": {"c": "3"}, "deployment": {"d": "4"}}
    return EngineFingerprint(**{"engine": "x", **parts, **changes})


def test_a_fingerprint_does_not_depend_on_order():
    assert fingerprint(semantic={"b": "2", "a": "1"}).digest == fingerprint().digest


@pytest.mark.parametrize(
    ("part", "value", "moved"),
    [
        ("semantic", {"a": "2"}, {"semantic"}),
        ("numeric", {"c": "4"}, {"numeric"}),
        ("deployment", {}, {"deployment"}),
        ("engine", "y", {"semantic", "numeric", "deployment"}),
    ],
)
def test_a_changed_part_changes_its_digest_and_the_whole(part, value, moved):
    before, after = fingerprint(), fingerprint(**{part: value})
    assert before.digest != after.digest
    assert {name for name, digest in after.digests().items() if digest != before.digests()[name]} == moved


@pytest.mark.parametrize("part", ["semantic", "numeric", "deployment", "engine"])
@pytest.mark.parametrize("fact", [{2: "threads"}, {"threads": 2}], ids=str)
def test_facts_are_strings_under_strings_and_an_engine_has_a_name(part, fact):
    with pytest.raises(InvalidValue):
        fingerprint(**{part: fact})
