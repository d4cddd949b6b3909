from typing import Any

import pytest

from zerodrift.records.verdict import Outcome
from zerodrift.view.comparison import Comparison, FactChange, NumberChange, Part, StatusChange
from zerodrift.view.tables import _EXPLANATIONS, explain


def fact(part: Part, before: str | None = "a", after: str | None = "b") -> FactChange:
    return FactChange(part=part, side="engine", name="dtype", before=before, after=after)


def comparison(*facts: FactChange, mean: tuple[float, float] = (0.01, 0.2), **more: Any) -> Comparison:
    settled: dict[str, Any] = {
        "verdict_before": Outcome.PASS,
        "verdict_after": Outcome.PASS,
        "causes": (),
        "probes": (),
    }
    numbers = (NumberChange(name="mean |Δ|", before=mean[0], after=mean[1]),)
    return Comparison(before="one", after="two", facts=facts, numbers=numbers, **settled | more)


@pytest.mark.parametrize("part", Part)
def test_the_part_that_explains_most_is_named_alone(part: Part) -> None:
    parts = list(Part)
    assert explain(comparison(*map(fact, parts[parts.index(part) :]))) == _EXPLANATIONS[part]


@pytest.mark.parametrize("part", Part)
def test_where_nothing_was_measured_otherwise_nothing_is_explained(part: Part) -> None:
    assert explain(comparison(fact(part), mean=(0.01, 0.01))).startswith(f"Only {part} facts differ")


@pytest.mark.parametrize("stated", [("a", None), (None, "b")])
def test_a_fact_that_one_run_alone_states_explains_nothing(stated: tuple[str | None, str | None]) -> None:
    assert explain(comparison(fact(Part.SEMANTIC, *stated))) == explain(comparison())
    assert explain(comparison(fact(Part.QUESTIONS, *stated))) == _EXPLANATIONS[Part.QUESTIONS]


def test_equal_facts_and_other_numbers_point_at_weights_and_determinism() -> None:
    assert "determinism" in explain(comparison())
    assert explain(comparison(mean=(0.01, 0.01))).startswith("Every fact")


def test_a_change_of_the_sampler_does_not_point_at_the_weights() -> None:
    drawn = (StatusChange(name="sampling", before="pass", after="fail"),)
    biased = (StatusChange(name="semantic/sampling-bias", before=None, after="fails"),)
    worse = {"verdict_after": Outcome.FAIL, "probes": drawn}
    assert "semantic/sampling-bias" in explain(comparison(**worse, causes=biased))
    for told in (explain(comparison(**worse, causes=biased)), explain(comparison(**worse))):
        assert told != explain(comparison())
        assert "weights" not in told
    both = (*drawn, StatusChange(name="parity", before="pass", after="fail"))
    assert explain(comparison(probes=both)) == explain(comparison())
