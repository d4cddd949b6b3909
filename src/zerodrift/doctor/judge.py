"""Which rules hold for these settings? Three answers are possible: yes, no, and that it cannot be known from here."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec

from zerodrift.doctor.rule import Rule, Severity, Test, rules
from zerodrift.doctor.secrets import safe, without_secrets
from zerodrift.doctor.setting import Origin, Setting, Settings, Value, shown

_NAME = re.compile(r"\{(\w+)\}")
_ORDER = list(Severity)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that holds."""

    rule: str
    setting: str
    severity: Severity
    message: str
    cause: str | None
    source: tuple[str, ...]
    changes: tuple[tuple[str, Value], ...]
    """Settings that would cure it."""
    do: str


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One setting with the worst that is said about it."""

    setting: Setting
    severity: Severity
    findings: tuple[Finding, ...]
    depends: tuple[str, ...] = ()
    """Settings that would have to be known to say more."""
    undecided: bool = False
    """Whether a rule of severity wrong could neither be shown to hold nor to fail."""


def judge(settings: Settings, matrix: Sequence[Rule] | None = None) -> tuple[Judgement, ...]:
    """Every setting, in the order given."""
    by_setting: dict[str, list[Rule]] = {name: [] for name in settings}
    for rule in rules() if matrix is None else matrix:
        by_setting.setdefault(rule.setting, []).append(rule)
    # What no rule is about is context, worth a line only where it is known.
    return tuple(
        _judgement(setting, by_setting[name], settings)
        for name, setting in settings.items()
        if by_setting[name] or setting.known
    )


def findings(judgements: Sequence[Judgement]) -> list[Finding]:
    """All of them, worst first."""
    found = chain.from_iterable(judgement.findings for judgement in judgements)
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))


def exit_code(judgements: Sequence[Judgement]) -> int:
    """1 where something is wrong; 3 where something that could be wrong cannot be seen; 0 otherwise."""
    severities = {judgement.severity for judgement in judgements}
    if Severity.WRONG in severities:
        return 1
    # Where something else is said about the same setting, that is the answer.
    open_ones = [each for each in judgements if each.undecided and each.severity is Severity.UNKNOWN]
    return 3 if open_ones else 0


def fixes(judgements: Sequence[Judgement]) -> dict[str, Value]:
    """All that `--fix` changes: of what is wrong and of what is at risk, the worst having the first word."""
    changes: dict[str, Value] = {}
    for finding in findings(judgements):
        if finding.severity in (Severity.WRONG, Severity.RISK):
            for name, value in finding.changes:
                changes.setdefault(name, value)
    return changes


def _judgement(setting: Setting, about: Sequence[Rule], settings: Settings) -> Judgement:
    answers = {rule.id: _holds(rule, settings) for rule in about}
    held = [_finding(rule, settings) for rule in about if answers[rule.id]]
    # What would be wrong or risky, and cannot be told: neither fine nor a finding.
    open_questions = [
        rule
        for rule in about
        if answers[rule.id] is None and rule.severity in (Severity.WRONG, Severity.RISK)
    ]
    severities = [finding.severity for finding in held]
    if open_questions or not (held or setting.known):
        severities.append(Severity.UNKNOWN)
    unseen = [
        name for rule in open_questions for name in rule.when if name in settings and not settings[name].known
    ]
    return Judgement(
        setting=setting,
        severity=min(severities, key=_ORDER.index, default=Severity.FINE),
        findings=tuple(sorted(held, key=lambda finding: _ORDER.index(finding.severity))),
        depends=tuple(dict.fromkeys(unseen)),
        undecided=any(rule.severity is Severity.WRONG for rule in open_questions),
    )


def _holds(rule: Rule, settings: Settings) -> bool | None:
    """True, False, or None where an unknown setting decides it."""
    # What is unknown does not excuse: `unless` needs to be shown.
    if any(_passes(name, test, settings) is True for name, test in rule.unless.items()):
        return False
    answers = [_passes(name, test, settings) for name, test in rule.when.items()]
    if False in answers:
        return False
    return None if None in answers else True


def _passes(name: str, test: Test, settings: Settings) -> bool | None:
    if name not in settings:
        return False
    setting = settings[name]
    if "known" in (given := test.given):
        return setting.known is given["known"]
    ((how, operand),) = given.items()
    if isinstance(operand, str) and operand.startswith("$"):
        other = settings.get(operand[1:])
        if other is None:
            return False
        if not other.known:
            return None
        operand = other.value
    return _compare(setting.value, how, operand) if setting.known else None


def _compare(value: Value, how: str, operand: object) -> bool:
    match how:
        case "is_":
            return _same(value, operand)
        case "not_":
            return not _same(value, operand)
        case "in_" | "not_in":
            assert isinstance(operand, tuple)
            return any(_same(value, each) for each in operand) is (how == "in_")
        case "starts_with":
            assert isinstance(operand, tuple)
            return any(
                isinstance(value, str) and value.startswith(each) if each is not None else value is None
                for each in operand
            )
    numbers = [
        each for each in (value, operand) if isinstance(each, int | float) and not isinstance(each, bool)
    ]
    if len(numbers) != 2:
        return False
    return numbers[0] > numbers[1] if how == "above" else numbers[0] < numbers[1]


def _same(value: Value, operand: object) -> bool:
    """1 and 1.0 are the same setting; 1 and true are not."""
    return value == operand and isinstance(value, bool) is isinstance(operand, bool)


def _finding(rule: Rule, settings: Settings) -> Finding:
    return Finding(
        rule=rule.id,
        setting=rule.setting,
        severity=rule.severity,
        message=_filled(rule.message, settings),
        cause=rule.cause,
        source=rule.source,
        changes=tuple(
            (name, _resolved(value, settings))
            for name, value in rule.fix.items()
            if not (value is None and _unwritten(settings.get(name)))
        ),
        do=_filled(rule.do, settings),
    )


def displayed(setting: Setting) -> str:
    """A value as it may be shown. What vLLM refuses is a sentence of ours, which names flags and no secret."""
    if not setting.known:
        return "?"
    return (without_secrets if setting.name == "refused" else safe)(shown(setting.value))


def _filled(text: str, settings: Settings) -> str:
    return _NAME.sub(lambda match: displayed(settings[match[1]]) if match[1] in settings else match[0], text)


def _unwritten(setting: Setting | None) -> bool:
    """Whether it comes with the checkpoint: there is nothing to take out."""
    return setting is not None and setting.origin is Origin.CHECKPOINT


def _resolved(value: Value, settings: Mapping[str, Setting]) -> Value:
    if isinstance(value, str) and value.startswith("$"):
        return settings[value[1:]].value
    return value
