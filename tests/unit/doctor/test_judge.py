"""The evaluator by itself: three answers, and what each of them leads to."""

import msgspec
import pytest

from zerodrift.doctor.judge import exit_code, findings, fixes, judge
from zerodrift.doctor.rule import Rule, Severity, Test
from zerodrift.doctor.setting import Origin, Setting, Settings, Value, unknown


def said(**values: Value) -> dict[str, Setting]:
    return {name: Setting(name, value, Origin.SET) for name, value in values.items()}


def rule(severity: Severity = Severity.WRONG, **when: Test) -> Rule:
    return Rule(
        id="r", setting="a", when=when, severity=severity, message="Is {a}.", source=("s",), fix={"a": "$b"}
    )


def holds(settings: Settings, **when: Test) -> bool:
    return bool(findings(judge(settings, [rule(**when)])))


@pytest.mark.parametrize(
    ("value", "test", "expected"),
    [
        (1.0, Test(is_=1), True),
        (True, Test(is_=1), False),
        (0, Test(is_=False), False),
        (None, Test(is_=None), True),
        ("x", Test(not_="y"), True),
        ("x", Test(in_=("x", None)), True),
        (None, Test(in_=("x", None)), True),
        ("x", Test(not_in=("x",)), False),
        ("AVX512_E1", Test(starts_with=(None, "AVX512")), True),
        ("AVX2", Test(starts_with=(None, "AVX512")), False),
        (None, Test(starts_with=(None, "AVX512")), True),
        (None, Test(starts_with=("AVX512",)), False),
        (512, Test(starts_with=("AVX512", None)), False),
        (2, Test(above=1), True),
        (1, Test(above=1), False),
        (0.9, Test(below=1), True),
        ("$N", Test(above=1), False),
        (True, Test(above=0), False),
        (3, Test(above="$b"), True),
        (2, Test(not_="$b"), False),
        (1, Test(known=True), True),
    ],
)
def test_comparisons(value: Value, test: Test, expected: bool) -> None:
    assert holds(said(a=value, b=2), a=test) is expected


def test_a_setting_that_does_not_apply_breaks_nothing() -> None:
    assert not holds(said(a=1), a=Test(is_=1), c=Test(is_=1))
    assert not holds(said(a=1), a=Test(not_="$c"))


def test_a_setting_that_is_unknown_leaves_it_open() -> None:
    (judgement,) = judge({"a": unknown("a")}, [rule(a=Test(is_=1))])
    assert (judgement.severity, judgement.depends, judgement.undecided) == (Severity.UNKNOWN, ("a",), True)
    assert exit_code([judgement]) == 3
    first, _ = (
        judge(
            {**said(a=1), "b": unknown("b")}, [rule(a=Test(not_="$b")), rule(Severity.NOTE, b=Test(is_=1))]
        )[:1]
        * 2
    )
    assert first.undecided


def test_what_fails_anyway_is_not_left_open() -> None:
    (judgement,) = judge({**said(a=1), "b": unknown("b")}, [rule(a=Test(is_=2), b=Test(is_=1))])
    assert judgement.severity is Severity.FINE
    assert exit_code([judgement]) == 0


def test_an_open_risk_does_not_decide() -> None:
    (judgement,) = judge({"a": unknown("a")}, [rule(Severity.RISK, a=Test(is_=1))])
    assert judgement.severity is Severity.UNKNOWN
    assert exit_code([judgement]) == 0


def test_unless_has_to_be_shown() -> None:
    excused = msgspec.structs.replace(rule(a=Test(is_=1)), unless={"b": Test(is_=1)})
    assert not findings(judge(said(a=1, b=1), [excused]))
    assert findings(judge({**said(a=1), "b": unknown("b")}, [excused]))


def test_a_finding_is_filled_in_and_its_cure_copied() -> None:
    settings = said(a=1, b="two")
    (finding,) = findings(judge(settings, [rule(a=Test(is_=1))]))
    assert finding.message == "Is 1."
    assert finding.changes == (("a", "two"),)
    assert fixes(judge(settings, [rule(a=Test(is_=1))])) == {"a": "two"}
    assert fixes(judge(settings, [rule(Severity.NOTE, a=Test(is_=1))])) == {}


def test_the_worst_comes_first() -> None:
    matrix = [rule(Severity.NOTE, a=Test(is_=1)), rule(Severity.WRONG, a=Test(is_=1))]
    judgements = judge(said(a=1, b=2), matrix)
    assert [finding.severity for finding in findings(judgements)] == [Severity.WRONG, Severity.NOTE]
    assert judgements[0].severity is Severity.WRONG
    assert exit_code(judgements) == 1


def test_a_rule_that_says_nothing_to_do_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a fix nor"):
        Rule(id="r", setting="a", when={}, severity=Severity.NOTE, message="S.", source=())
    with pytest.raises(ValueError, match="one thing"):
        Test(is_=1, not_=2)
    with pytest.raises(ValueError, match="one thing"):
        Test()
