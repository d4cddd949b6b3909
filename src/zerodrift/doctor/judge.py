"""Which rules hold for these settings? Three answers are possible: yes, no, and that it cannot be known from here."""

import re
from collections.abc import Collection, Sequence

import msgspec

from zerodrift.doctor.rule import HOW, Rule, Severity, Test, rules
from zerodrift.doctor.secrets import safe
from zerodrift.doctor.setting import Origin, Setting, Settings, Value

_NAME = re.compile(r"\{(\w+)\}")
_ORDER = list(Severity)


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One setting with the worst that is said about it."""

    setting: Setting
    severity: Severity
    findings: tuple[Rule, ...]
    """Rules that hold, with values put into their words."""
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


def findings(judgements: Sequence[Judgement]) -> list[Rule]:
    """All of them, worst first."""
    found = [finding for judgement in judgements for finding in judgement.findings]
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))


def exit_code(judgements: Sequence[Judgement]) -> int:
    """1 where something is wrong; 3 where something that could be wrong cannot be seen; 0 otherwise."""
    if any(each.severity is Severity.WRONG for each in judgements):
        return 1
    # Where something else is said about the same setting, that is the answer.
    hidden = any(each.undecided and each.severity is Severity.UNKNOWN for each in judgements)
    return 3 if hidden else 0


def fixes(
    judgements: Sequence[Judgement], severities: Collection[Severity] = (Severity.WRONG, Severity.RISK)
) -> dict[str, Value]:
    """What cures findings of these severities, the worst having the first word."""
    changes: dict[str, Value] = {}
    for finding in findings(judgements):
        if finding.severity in severities:
            for name, value in finding.fix.items():
                changes.setdefault(name, value)
    return changes


def _judgement(setting: Setting, about: Sequence[Rule], settings: Settings) -> Judgement:
    answers = {rule.id: _holds(rule, settings) for rule in about}
    held = [_filled_in(rule, settings) for rule in about if answers[rule.id]]
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
        findings=tuple(held),
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
    ((how, operand),) = test.items()
    if how == "known":
        return setting.known is operand
    if isinstance(operand, str) and operand.startswith("$"):
        other = settings.get(operand[1:])
        if other is None:
            return False
        if not other.known:
            return None
        operand = other.value
    return HOW[how](setting.value, operand) if setting.known else None


def _filled_in(rule: Rule, settings: Settings) -> Rule:
    """With the values of settings in its words and in its cure."""

    def filled(text: str) -> str:
        return _NAME.sub(
            lambda match: displayed(settings[match[1]]) if match[1] in settings else match[0], text
        )

    fix = {
        name: settings[value[1:]].value if isinstance(value, str) and value.startswith("$") else value
        for name, value in rule.fix.items()
        # What comes with the checkpoint cannot be taken out.
        if value is not None or name not in settings or settings[name].origin is not Origin.CHECKPOINT
    }
    return msgspec.structs.replace(rule, message=filled(rule.message), do=filled(rule.do), fix=fix)


def displayed(setting: Setting) -> str:
    """A value as it may be shown. What vLLM refuses is a sentence of ours, which names flags and no secret."""
    if not setting.known:
        return "?"
    if setting.value is None or isinstance(setting.value, bool):
        return {None: "none", True: "on", False: "off"}[setting.value]
    return str(setting.value) if setting.name == "refused" else safe(str(setting.value))
