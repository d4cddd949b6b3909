"""What is said of a split, and what it does to the causes that were there."""

import msgspec
import pytest

from zerodrift.audit.by_split import nameless, with_split
from zerodrift.audit.counterfactual.boundary import Parted
from zerodrift.audit.counterfactual.properties import CACHED, OUTPUT, POSITION, PROMPT, edge
from zerodrift.audit.probes.result import found
from zerodrift.drift.split import Cut, Split
from zerodrift.records.evidence import LocatedEvidence
from zerodrift.records.verdict import FoundBy

BODY = found("path/body-precision", "vllm", FoundBy.SIZE, "as large as bf16", gating=True)
UNNAMED = found("unexplained", "vllm", FoundBy.VALUE, "9 σ left")
HINT = found("semantic/penalty", "vllm", FoundBy.VALUE, "a part", gating=False)
ROPE = found("path/rope", "vllm", FoundBy.VALUE, "another base", gating=True)

PLACE = LocatedEvidence(
    layer=2, part="attention head", quantity="output", estimate=0.99, low=0.99, high=0.99, neutral=1.0, r2=1.0
)


def cut(name: str, inside: float = 272, outside: float = 128, *, above: bool = True) -> Cut:
    return Cut(name, above, inside, outside, 300.0)


def parted(*cuts: Cut) -> Parted:
    return Parted(Split(cuts[0], cuts[1:], 120, 128, 0, 1900, 0.999, 0.0005))


@pytest.mark.parametrize(
    ("cuts", "name"),
    [
        ((cut(POSITION),), "path/context-boundary"),
        ((cut(CACHED, 1, 0),), "path/prefix-cache"),
        ((cut(PROMPT),), "unexplained"),
        ((cut(OUTPUT),), "unexplained"),
        # Not told apart, and not the side that the name is about.
        ((cut(POSITION), cut(PROMPT)), "unexplained"),
        ((cut(POSITION, 128, 272, above=False),), "unexplained"),
    ],
)
def test_a_property_that_has_a_cause_names_it_if_no_other_does_as_well(cuts, name):
    causes = with_split((UNNAMED, HINT), parted(*cuts), "vllm")
    assert [(each.cause, each.gating) for each in causes] == [(name, True), (HINT.cause, False)]
    assert "split:" in causes[0].evidence
    assert UNNAMED.evidence in causes[0].evidence


def test_rounding_by_size_is_refuted():
    (only,) = with_split((BODY,), parted(cut(PROMPT)), "vllm")
    assert only.cause == "unexplained"
    assert only.fix != BODY.fix


def test_without_a_split_nothing_changes():
    assert with_split((BODY, HINT), None, "vllm") == (BODY, HINT)


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ((UNNAMED, HINT), True),
        ((BODY,), True),
        ((ROPE,), False),
        ((ROPE, BODY), False),
    ],
)
def test_only_what_predicts_numbers_stands_against_a_split(causes, expected):
    assert nameless(causes) is expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (cut(PROMPT, 272, 128), "129–272"),
        (cut(PROMPT, 129, 128), "129"),
        (cut(PROMPT, 128, 272, above=False), "128–271"),
        (cut("temperature", 0.7, 0.2), "0.7"),
    ],
)
def test_an_edge_is_told_with_what_it_lies_between(given, words):
    assert edge(given) == words


def test_a_place_in_the_model_is_a_name():
    located = msgspec.structs.replace(UNNAMED, located=(PLACE,))
    assert not nameless((located,))
