from typing import Any

import pytest

from zerodrift.records.verdict import Outcome
from zerodrift.view.verdict import summarise


@pytest.mark.parametrize(
    ("outcome", "headline"),
    [
        (Outcome.PASS, "The same policy"),
        (Outcome.FAIL, "Not the same policy"),
        (Outcome.INCONCLUSIVE, "Not judged"),
    ],
)
def test_the_headline_says_whether_it_is_the_same_policy(
    examples: Any, outcome: Outcome, headline: str
) -> None:
    assert summarise(examples.verdict(outcome, guilty="none", says="")).headline == headline


@pytest.mark.parametrize(
    ("guilty", "words"),
    [
        ("engine", "The engine (vllm)"),
        ("trainer", "The trainer"),
        ("none", "Neither side"),
        ("unknown", "Not known"),
        ("a later version's word", "a later version's word"),
    ],
)
def test_the_guilty_side_in_words(examples: Any, guilty: str, words: str) -> None:
    assert summarise(examples.verdict(Outcome.FAIL, guilty=guilty, says="")).guilty == words


def test_causes_to_fix_are_told_from_those_below_the_gate(examples: Any) -> None:
    causes = (
        examples.cause("path/batch-variance", 0.4, ""),
        examples.cause("semantic/bos", 1.0, ""),
        examples.cause("weights/stale", 1.0, ""),
    )
    said = summarise(examples.verdict(Outcome.FAIL, guilty="engine", says="why", causes=causes))
    assert said.principal is causes[1]
    assert said.to_fix == causes[1:]
    assert said.listed == causes[:1]
    assert said.why == "why"


def test_without_a_gating_cause_there_is_no_principal(examples: Any) -> None:
    causes = (examples.cause("path/batch-variance", 0.4, ""),)
    assert summarise(examples.verdict(Outcome.PASS, guilty="none", says="", causes=causes)).principal is None
