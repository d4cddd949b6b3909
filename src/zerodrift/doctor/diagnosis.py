"""The whole answer, as `--json` writes it and the terminal shows it."""

import math

import msgspec

from zerodrift.core.cause import CAUSES
from zerodrift.core.errors import ConfigError
from zerodrift.doctor.judge import Judgement, displayed, exit_code, findings, judge
from zerodrift.doctor.rule import Rule, Severity
from zerodrift.doctor.setting import Origin, Reading, Setting, Settings, Target, Value
from zerodrift.doctor.tables import names

SCHEMA = "zerodrift.doctor/2"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One setting in force."""

    setting: str
    title: str
    value: Value
    shown: str
    origin: Origin
    severity: Severity
    message: str
    """Why it is fine, or why it cannot be told; what is found stands in the findings."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One finding, with what to type."""

    rule: str
    setting: str
    title: str
    value: str
    severity: Severity
    message: str
    cause: str | None
    type: tuple[str, ...]
    """As it is written in this target."""
    do: str
    source: tuple[str, ...]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is said about one target."""

    schema: str = SCHEMA
    target: str
    exit_code: int
    settings: tuple[Row, ...]
    findings: tuple[Advice, ...]
    not_judged: tuple[str, ...]
    unseen: str = ""
    """How to let us see more, where most of the settings are hidden."""

    def counts(self) -> list[str]:
        """How often each severity occurs, worst first."""
        found = [advice.severity for advice in self.findings]
        found += [row.severity for row in self.settings if row.severity is Severity.UNKNOWN]
        plural = (Severity.RISK, Severity.NOTE)
        return [
            f"{number} {each}s" if number > 1 and each in plural else f"{number} {each}"
            for each in Severity
            if (number := found.count(each))
        ]


def diagnose(
    target: Target, asked: Settings, *, asks_server: bool = False
) -> tuple[Diagnosis, tuple[Judgement, ...]]:
    """Read `target` and judge it; `asked` are settings that the caller knows and the target does not say.

    A caller that `asks_server` need not be told to ask the one that the target names.
    """
    reading = target.read()
    _require_numbers(reading.settings)
    to_ask = f"engine.url: ask it with zerodrift doctor {reading.server}"
    judgements = judge(_ordered(reading, asked))
    return (
        Diagnosis(
            target=target.title,
            exit_code=exit_code(judgements),
            settings=tuple(_row(judgement) for judgement in judgements),
            findings=tuple(_advice(finding, judgements, target) for finding in findings(judgements)),
            not_judged=(
                *reading.not_judged,
                *((to_ask,) if reading.server and not asks_server else ()),
            ),
            unseen=reading.unseen,
        ),
        judgements,
    )


def _require_numbers(settings: Settings) -> None:
    """NaN is not even itself, so that every rule about it would hold."""
    for name, setting in settings.items():
        if isinstance(setting.value, float) and not math.isfinite(setting.value):
            raise ConfigError(
                f"{name} is {setting.value}, which is no number to sample or score with; write one"
            )


def _ordered(reading: Reading, asked: Settings) -> dict[str, Setting]:
    """In the order of the table of names. What the target says itself, it says better than the caller."""
    known = {name: setting for name, setting in reading.settings.items() if setting.known}
    every = {**reading.settings, **asked, **known}
    return {name: every[name] for name in names() if name in every}


def _row(judgement: Judgement) -> Row:
    setting = judgement.setting
    name = names()[setting.name]
    message = name.fine if judgement.severity is Severity.FINE else ""
    if judgement.severity is Severity.UNKNOWN:
        others = [names()[other].title for other in judgement.depends if other != setting.name]
        message = (
            f"Depends on {', '.join(others)}." if others and setting.known else "It cannot be seen from here."
        )
    return Row(
        setting=setting.name,
        title=name.title,
        value=displayed(setting) if isinstance(setting.value, str) else setting.value,
        shown=displayed(setting),
        origin=setting.origin,
        severity=judgement.severity,
        message=message,
    )


def _advice(finding: Rule, judgements: tuple[Judgement, ...], target: Target) -> Advice:
    about = next(judgement.setting for judgement in judgements if judgement.setting.name == finding.setting)
    typed = [text for name, value in finding.fix.items() if (text := target.typed(name, value)) is not None]
    # Not a setting of this target: then of its requests, which the cause knows about.
    elsewhere = CAUSES[finding.cause].fix("vllm") if finding.cause and not typed else ""
    return Advice(
        rule=finding.id,
        setting=finding.setting,
        title=names()[finding.setting].title,
        value=displayed(about),
        severity=finding.severity,
        message=finding.message,
        cause=finding.cause,
        type=tuple(typed),
        do=finding.do or elsewhere,
        source=finding.source,
    )
