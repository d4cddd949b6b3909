from typing import Any

import pytest

from zerodrift.records.verdict import Outcome
from zerodrift.view.comparison import Comparison, FactChange, NumberChange, Part, SameRequests, StatusChange
from zerodrift.view.tables import explain


def fact(part: Part, name: str = "dtype", before: str | None = "a", after: str | None = "b") -> FactChange:
    side = "audit" if part is Part.QUESTIONS else "engine"
    return FactChange(part=part, side=side, name=name, before=before, after=after)


def comparison(
    *facts: FactChange, mean: tuple[float | None, float | None] = (0.01, 0.2), **more: Any
) -> Comparison:
    settled: dict[str, Any] = {
        "verdict_before": Outcome.PASS,
        "verdict_after": Outcome.FAIL,
        "causes": (),
        "probes": (),
    }
    numbers = (NumberChange(name="mean |Δ|", before=mean[0], after=mean[1]),)
    return Comparison(before="one", after="two", facts=facts, numbers=numbers, **settled | more)


ALIKE: dict[str, Any] = {"verdict_after": Outcome.PASS, "mean": (0.01, 0.01)}


@pytest.mark.parametrize("part", Part)
def test_the_part_that_explains_most_is_named_alone(part: Part) -> None:
    parts = list(Part)
    later = [fact(each, "later") for each in parts[parts.index(part) + 1 :]]
    sentence = explain(comparison(fact(part), *later))
    assert "dtype a → b" in sentence
    assert "later" not in sentence
    measured_alike = explain(comparison(fact(part), **ALIKE))
    assert "dtype a → b" in measured_alike
    assert measured_alike != sentence


def test_causes_that_came_and_went_are_named_and_listed_ones_are_not() -> None:
    causes = (
        StatusChange(name="semantic/raw-logprobs", before=None, after="fails"),
        StatusChange(name="path/batch-variance", before="listed", after=None),
        StatusChange(name="semantic/bos", before="fails", after="listed"),
    )
    sentence = explain(comparison(fact(Part.SEMANTIC), causes=causes))
    assert "from PASS to FAIL with semantic/raw-logprobs and without semantic/bos" in sentence
    assert "from 0.01 to 0.2" in sentence
    assert "path/batch-variance" not in sentence


def test_a_fact_that_one_run_alone_states_is_no_difference() -> None:
    one_sided = explain(comparison(fact(Part.SEMANTIC, "lora", None, "null")))
    assert one_sided != explain(comparison(fact(Part.SEMANTIC, "lora", "x", "null")))
    assert "lora" in one_sided
    assert explain(comparison()) != one_sided


@pytest.mark.parametrize(
    ("cause", "beyond"),
    [
        ("weights/stale", True),
        ("semantic/raw-logprobs", True),
        ("path/batch-variance", False),
        ("unexplained", False),
        ("of/another-version", False),
    ],
)
def test_rounding_does_not_explain_causes_of_other_layers(cause: str, beyond: bool) -> None:
    causes = (StatusChange(name=cause, before=None, after="fails"),)
    sentence = explain(comparison(fact(Part.NUMERIC), causes=causes))
    assert (f"rounding does not make {cause}" in sentence) is beyond
    assert ("explains it as rounding" in sentence) is not beyond


@pytest.mark.parametrize(
    ("answers", "verdict", "draws"),
    [
        ({}, Outcome.PASS, True),
        # As many tokens as one would have by chance, another number, the same tokens throughout, a worse verdict.
        ({"shared_tokens": 15}, Outcome.PASS, False),
        ({"differing": 1}, Outcome.PASS, False),
        ({"same_tokens": 64}, Outcome.PASS, False),
        ({}, Outcome.FAIL, False),
    ],
)
def test_other_tokens_with_the_same_numbers_are_no_rounding(
    answers: dict[str, int], verdict: Outcome, draws: bool
) -> None:
    seen = {"samples": 64, "same_tokens": 0, "shared_tokens": 48, "differing": 0} | answers
    found = comparison(fact(Part.NUMERIC), verdict_after=verdict, answers=SameRequests(**seen, largest=0.0))
    assert ("what changed is which tokens a seed draws" in explain(found)) is draws
    assert ("explains it as rounding" in explain(found)) is not draws


@pytest.mark.parametrize("mean", [(None, 0.1), (0.1, None)])
def test_without_a_mean_on_both_sides_none_is_compared(mean: tuple[float | None, float | None]) -> None:
    assert explain(comparison(mean=mean)).startswith("The verdict went from PASS to FAIL; ")


def test_three_facts_are_named_and_the_rest_counted() -> None:
    facts = [fact(Part.NUMERIC, f"fact{number}") for number in range(5)]
    assert "fact2 a → b, and 2 more)" in explain(comparison(*facts))
    assert "more" not in explain(comparison(*facts[:3]))


def test_foreign_text_is_visible_and_short() -> None:
    hostile = fact(Part.SEMANTIC, "{facts}\x1b[2J", "{0}\n", "x" * 10_000)
    causes = (StatusChange(name="bad\x07", before=None, after="fails"),)
    sentence = explain(comparison(hostile, causes=causes))
    assert sentence.isprintable()
    assert "{facts}␛[2J {0}␊ → xxx" in sentence
    assert "bad␇" in sentence
    assert len(sentence) < 1000


@pytest.mark.parametrize("what", ["causes", "probes"])
def test_an_outcome_that_changed_is_a_change_even_where_every_number_is_equal(what: str) -> None:
    other = (StatusChange(name="path/batch-variance", before="pass", after="listed"),)
    assert "look at the weights and at determinism" in explain(comparison(**ALIKE | {what: other}))
