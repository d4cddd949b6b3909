"""Tokens of the reference before an engine that is played by the test."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from zerodrift.audit.probes.given import (
    MOST_ROWS,
    Given,
    check_weights,
    given_tokens,
    recorded_in,
    same_reference,
    sampled_by,
)
from zerodrift.audit.score_meaning import score_meaning
from zerodrift.backends.base import Capability
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.core.errors import BadAnswer, DigestMismatch
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.records.baseline import BaselineHeader, BaselineRow
from zerodrift.records.verdict import Outcome

GIVEN = [Given((1, 2, 3, 4), np.array([-1.0, -1.0])), Given((5, 6, 7), np.array([-1.0]))]


def scores(gap: float) -> Callable[[Sequence[int]], list[float]]:
    return lambda ids: [-1.0 - gap] * (len(ids) - 1)


@pytest.mark.parametrize(("gap", "status"), [(0.0, Outcome.PASS), (1e-6, Outcome.PASS), (0.1, Outcome.FAIL)])
def test_only_the_tokens_that_were_sampled_are_compared(scripted, gates, gap, status):
    result = given_tokens(scripted(None, scores=scores(gap)), GIVEN, gates)
    assert result.record.status is status
    assert result.record.evidence["tokens"] == 3
    assert result.record.evidence["mean"] == pytest.approx(gap)


def test_the_prompt_does_not_count(scripted, gates):
    played = scripted(None, scores=lambda ids: [-9.0, *[-1.0] * (len(ids) - 2)])
    assert given_tokens(played, GIVEN, gates).record.status is Outcome.PASS


def test_an_engine_that_cannot_score_is_not_judged(scripted, gates):
    played = scripted(None, capabilities=frozenset(Capability) - {Capability.SCORE})
    result = given_tokens(played, GIVEN, gates)
    assert (result.record.status, result.record.required) == (Outcome.INCONCLUSIVE, False)


def test_numbers_that_are_none_are_a_bad_answer(scripted, gates):
    with pytest.raises(BadAnswer):
        given_tokens(scripted(None, scores=lambda ids: [float("nan")] * (len(ids) - 1)), GIVEN, gates)


# --- recorded ground truth --------------------------------------------------------------------------------------


@pytest.fixture
def header(llama):
    return BaselineHeader(
        model="testbed:llama",
        weights=llama.version.digest or "",
        prompts="0",
        count=3,
        sampling=SamplingParams(),
        reference=llama.fingerprint(),
    )


@pytest.fixture(scope="module")
def sampled(llama):
    requests = [Request(Prompt((0, 9 + row)), SamplingParams(max_tokens=4, seed=row)) for row in range(3)]
    return sampled_by(llama, requests)


def test_fresh_samples_are_scored_by_the_reference(llama, sampled):
    for item, row in zip(sampled, llama.score([item.ids for item in sampled]), strict=True):
        assert np.allclose(item.logprobs, row[1:], atol=1e-12)


def test_the_reference_still_says_what_it_said(llama, header, sampled, gates):
    assert same_reference(llama, header, sampled, gates).record.status is Outcome.PASS


def test_a_reference_that_moved_cannot_judge(llama, header, sampled, gates):
    """Two thousandths of a nat, and another library than today's."""
    before = msgspec.structs.replace(
        header.reference, numeric={**header.reference.numeric, "transformers": "4.0"}
    )
    moved = [Given(item.ids, item.logprobs - 0.002) for item in sampled]
    result = same_reference(llama, msgspec.structs.replace(header, reference=before), moved, gates)
    assert (result.record.status, result.record.required) == (Outcome.INCONCLUSIVE, True)
    assert "transformers 4.0 →" in result.record.message
    result = same_reference(llama, header, moved, gates)
    assert "nothing that its fingerprint shows" in result.record.message


def test_other_weights_are_refused(llama, header):
    check_weights(llama, header)
    with pytest.raises(DigestMismatch, match=r"record it again"):
        check_weights(llama, msgspec.structs.replace(header, weights="other"))


def test_rows_come_from_all_over_the_file():
    rows = [
        BaselineRow(
            index=number,
            prompt=(1, number),
            output=(3,) if number != 1 else (),
            logprobs=(-2.0,) if number != 1 else (),
            raw_logprobs=(-1.0,) if number != 1 else (),
        )
        for number in range(10 * MOST_ROWS)
    ]
    given = recorded_in(rows)
    assert len(given) == MOST_ROWS
    assert {item.ids[1] for item in given} > {0}
    assert max(item.ids[1] for item in given) > 8 * MOST_ROWS
    assert given[0].logprobs.tolist() == [-1.0]
    assert len(recorded_in(rows[:3])) == 2, "a row without output has nothing to compare"


# --- what wrong scores mean -----------------------------------------------------------------------------------------


class Scores:
    """An engine of which only scores matter."""

    name, capabilities = "scored", frozenset({Capability.SCORE})

    def __init__(self, inner: ReferenceBackend, change: Callable[[list[float]], list[float]]) -> None:
        self._inner, self._change = inner, change

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [self._change(row) for row in self._inner.score(sequences)]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda row: [row[0], *row[:-1]], ["semantic/off-by-one"]),
        (lambda row: [*row[1:], row[-1]], ["semantic/off-by-one"]),
        (lambda row: [value / np.log(2) for value in row], ["semantic/notation"]),
        (lambda row: [value / np.log(10) for value in row], ["semantic/notation"]),
        # Numbers of nothing known, and right ones.
        (lambda row: [-((-value) ** 1.2) for value in row], []),
        (lambda row: row, []),
    ],
)
def test_wrong_scores_are_held_against_what_reports_get_wrong(llama, gates, change, names):
    prompts = [Prompt((40 + 3 * row, 17, 99 - row, 230)) for row in range(6)]
    asked = [
        Request(prompt, SamplingParams(max_tokens=12, seed=row, ignore_eos=True))
        for row, prompt in enumerate(prompts)
    ]
    engine: Any = Scores(llama, change)
    result = given_tokens(
        engine, sampled_by(llama, asked), gates, partial(score_meaning, llama, gates, "vllm")
    )
    assert [(cause.cause, cause.found_by) for cause in result.causes] == [
        (name, "given-tokens") for name in names
    ]
