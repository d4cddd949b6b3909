"""What is written comes back equal, value by value and bit by bit, through JSON and through a file."""

import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerodrift.core.completion import (
    Completion,
    EngineFingerprint,
    FinishReason,
    LogprobKind,
    Problem,
    TokenAlternative,
)
from zerodrift.core.request import MAX_SEED, Prompt, Request, SamplingParams
from zerodrift.core.version import LineageSegment, VersionSpan, WeightVersion
from zerodrift.records.codec import LineWriter, read_lines
from zerodrift.records.directory import read_verdict, write_verdict
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import CauseFound, Outcome, ProbeRecord, VerdictRecord

# Each example touches the disk, and JSON itself is tried in full by itself.
FEWER = settings(max_examples=settings().max_examples // 8)

words = st.text(max_size=12)
token_ids = st.integers(0, 200_000)
logprobs = st.one_of(st.floats(-9997.0, 0.0), st.floats(-2.0, 1e-4), st.just(-0.0))
versions = st.builds(WeightVersion, st.text(min_size=1, max_size=8), st.none() | words)
finite = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.dictionaries(words, finite, max_size=4)
facts = st.dictionaries(words, words, max_size=4)
fingerprints = st.builds(EngineFingerprint, engine=words, semantic=facts, numeric=facts, deployment=facts)

samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.01, 100.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(0, 10**6),
    min_p=st.floats(0.0, 1.0, exclude_max=True),
    repetition_penalty=st.floats(1e-3, 1e6),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    logit_bias=st.dictionaries(token_ids, st.floats(-100.0, 100.0), max_size=3),
    seed=st.none() | st.integers(0, MAX_SEED),
    n=st.integers(1, 64),
    max_tokens=st.integers(40, 10**6),
    min_tokens=st.integers(0, 40),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
prompts = st.builds(
    Prompt, st.lists(token_ids, min_size=1, max_size=9).map(tuple), st.none() | words, st.none() | words
)
requests = st.builds(Request, prompts, samplings)
problems = st.builds(Problem, words, words)


def cut(draw: st.DrawFn, kind: Any, length: int) -> tuple[Any, ...]:
    """Spans that cover [0, length), cut anywhere."""
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    bounds = [0, *cuts, length] if length else []
    return tuple(kind(draw(versions), start, end) for start, end in itertools.pairwise(bounds))


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    prompt = draw(st.lists(token_ids, min_size=1, max_size=6).map(tuple))
    output = draw(st.lists(token_ids, max_size=6).map(tuple))
    alternatives = st.lists(st.builds(TokenAlternative, token_ids, logprobs), max_size=3).map(tuple)
    written = len(prompt) + max(len(output) - 1, 0)
    return Completion(
        prompt_token_ids=prompt,
        token_ids=output,
        logprobs=tuple(draw(logprobs) for _ in output),
        kind=draw(st.sampled_from(LogprobKind)),
        sampling=draw(samplings),
        finish_reason=draw(st.sampled_from(FinishReason)),
        versions=cut(draw, VersionSpan, len(output)),
        fingerprint=draw(words),
        sample_index=draw(st.integers(0, 63)),
        lineage=cut(draw, LineageSegment, written) if draw(st.booleans()) else (),
        top_logprobs=tuple(draw(alternatives) for _ in output) if draw(st.booleans()) else (),
        prompt_logprobs=(None, *(draw(logprobs) for _ in prompt[1:])) if draw(st.booleans()) else (),
        cached_tokens=draw(st.none() | st.integers(0, 10**6)),
        text=draw(st.none() | words),
    )


rollouts = st.builds(
    lambda outcome, **shared: Rollout(**shared, **outcome),
    st.one_of(
        st.fixed_dictionaries({"completion": completions()}), st.fixed_dictionaries({"problem": problems})
    ),
    index=st.integers(0, 10**6),
    group=words,
    request=requests,
    source=st.sampled_from(["engine", "reference"]),
)
verdicts = st.builds(
    VerdictRecord,
    verdict=st.sampled_from(Outcome),
    guilty=words,
    message=words,
    engine=fingerprints,
    reference=fingerprints,
    model=words,
    precision=words,
    floor=numbers,
    metrics=numbers,
    gates=numbers,
    causes=st.lists(
        st.builds(CauseFound, explained=finite, interval=st.tuples(finite, finite)), max_size=2
    ).map(tuple),
    probes=st.lists(
        st.builds(
            ProbeRecord,
            evidence=st.dictionaries(
                words, st.one_of(finite, st.integers(-(2**63), 2**63), words, st.booleans()), max_size=3
            ),
            seconds=finite,
        ),
        max_size=2,
    ).map(tuple),
    reproduce=words,
)


def check_round_trip(value: Any) -> None:
    """Equal, of equal types all the way down, and equal again when written twice."""
    document = msgspec.json.encode(value)
    back = msgspec.json.decode(document, type=type(value))
    assert back == value
    assert repr(back) == repr(value)  # tells -0.0 from 0.0 and 1 from 1.0 and True
    assert msgspec.json.encode(back) == document


@given(st.one_of(requests, completions(), rollouts, verdicts))
def test_json(value: Any) -> None:
    check_round_trip(value)


@FEWER
@given(st.lists(rollouts, max_size=3))
def test_a_file_of_rollouts(tmp_path_factory: pytest.TempPathFactory, values: list[Rollout]) -> None:
    path = tmp_path_factory.mktemp("lines") / "rollouts.jsonl"
    with LineWriter[Rollout](path) as writer:
        for value in values:
            writer.write(value)
    assert list(read_lines(path, Rollout)) == values


@FEWER
@given(verdicts)
def test_a_verdict_in_its_directory(tmp_path_factory: pytest.TempPathFactory, record: VerdictRecord) -> None:
    directory: Path = tmp_path_factory.mktemp("run")
    write_verdict(directory, record)
    assert repr(read_verdict(directory)) == repr(record)


def test_the_check_sees_a_value_that_json_cannot_carry() -> None:
    with pytest.raises(msgspec.ValidationError):
        check_round_trip(TokenAlternative(1, math.nan))
