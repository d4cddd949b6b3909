"""The evaluator by itself: three answers, and what each of them leads to."""

import msgspec
import pytest

from zerodrift.doctor.judge import exit_code, findings, fixes, judge
from zerodrift.doctor.rule import Rule, Severity
from zerodrift.doctor.rule import Test as HowTo
from zerodrift.doctor.setting import Origin, Setting, Settings, Value, unknown


def said(**values: Value) -> dict[str, Setting]:
    return {name: Setting(name, value, Origin.SET) for name, value in values.items()}


def rule(severity: Severity = Severity.WRONG, **when: HowTo) -> Rule:
    return Rule(
        id="r", setting="a", when=when, severity=severity, message="Is {a}.", source=("s",), fix={"a": "$b"}
    )


def holds(settings: Settings, **when: HowTo) -> bool:
    return bool(findings(judge(settings, [rule(Severity.WRONG, **when)])))


@pytest.mark.parametrize(
    ("value", "test", "expected"),
    [
        (1.0, {"is": 1}, True),
        (True, {"is": 1}, False),
        (0, {"is": False}, False),
        (None, {"is": None}, True),
        ("x", {"not": "y"}, True),
        ("x", {"in": ("x", None)}, True),
        (None, {"in": ("x", None)}, True),
        ("x", {"not in": ("x",)}, False),
        ("AVX512_E1", {"starts with": (None, "AVX512")}, True),
        ("AVX2", {"starts with": (None, "AVX512")}, False),
        (None, {"starts with": (None, "AVX512")}, True),
        (None, {"starts with": ("AVX512",)}, False),
        (512, {"starts with": ("AVX512", None)}, False),
        (2, {"above": 1}, True),
        (1, {"above": 1}, False),
        (0.9, {"below": 1}, True),
        ("$N", {"above": 1}, False),
        (True, {"above": 0}, False),
        (3, {"above": "$b"}, True),
        (2, {"not": "$b"}, False),
        (1, {"known": True}, True),
    ],
)
def test_comparisons(value, test, expected):
    assert holds(said(a=value, b=2), a=test) is expected


def test_a_setting_that_does_not_apply_breaks_nothing():
    assert not holds(said(a=1), a={"is": 1}, c={"is": 1})
    assert not holds(said(a=1), a={"not": "$c"})


def test_a_setting_that_is_unknown_leaves_it_open():
    (judgement,) = judge({"a": unknown("a")}, [rule(a={"is": 1})])
    assert (judgement.severity, judgement.depends, judgement.undecided) == (Severity.UNKNOWN, ("a",), True)
    assert exit_code([judgement]) == 3
    assert judge({**said(a=1), "b": unknown("b")}, [rule(a={"not": "$b"})])[0].undecided


def test_what_fails_anyway_is_not_left_open():
    (judgement,) = judge({**said(a=1), "b": unknown("b")}, [rule(a={"is": 2}, b={"is": 1})])
    assert judgement.severity is Severity.FINE
    assert exit_code([judgement]) == 0


def test_an_open_risk_does_not_decide():
    (judgement,) = judge({"a": unknown("a")}, [rule(Severity.RISK, a={"is": 1})])
    assert judgement.severity is Severity.UNKNOWN
    assert exit_code([judgement]) == 0


def test_unless_has_to_be_shown():
    excused = msgspec.structs.replace(rule(a={"is": 1}), unless={"b": {"is": 1}})
    assert not findings(judge(said(a=1, b=1), [excused]))
    assert findings(judge({**said(a=1), "b": unknown("b")}, [excused]))


def test_a_finding_is_filled_in_and_its_cure_copied():
    settings = said(a=1, b="two")
    (finding,) = findings(judge(settings, [rule(a={"is": 1})]))
    assert finding.message == "Is 1."
    assert finding.fix == {"a": "two"}
    assert fixes(judge(settings, [rule(a={"is": 1})])) == {"a": "two"}
    assert fixes(judge(settings, [rule(Severity.NOTE, a={"is": 1})])) == {}


def test_the_worst_comes_first():
    matrix = [rule(Severity.NOTE, a={"is": 1}), rule(Severity.WRONG, a={"is": 1})]
    judgements = judge(said(a=1, b=2), matrix)
    assert [finding.severity for finding in findings(judgements)] == [Severity.WRONG, Severity.NOTE]
    assert judgements[0].severity is Severity.WRONG
    assert exit_code(judgements) == 1


@pytest.mark.parametrize(
    ("test", "do"), [({"is": 1, "not": 2}, "d"), ({}, "d"), ({"like": 1}, "d"), ({"is": 1}, "")]
)
def test_a_rule_that_compares_in_two_ways_or_says_nothing_to_do_is_refused(test, do):
    sound = msgspec.structs.replace(rule(a={"is": 1}), do="d", fix={})
    with pytest.raises(ValueError):  # noqa: PT011 (only the rule is built here)
        msgspec.structs.replace(sound, when={"a": test}, do=do)
