"""What does each item of a preflight say? Answers of the doctor and of an audit, as lines of one checklist.

Nothing is measured here and nothing is judged twice: an item is what its probe found, in one word of five. What an
earlier item made impossible is SKIPPED and says so; the earlier one decides.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from zerodrift.core.cause import CAUSES, UNEXPLAINED
from zerodrift.doctor.diagnosis import Advice, Diagnosis
from zerodrift.doctor.rule import Severity
from zerodrift.records.evidence import RewardsEvidence
from zerodrift.records.preflight import Item, Status, worst
from zerodrift.records.rewards import Rewards
from zerodrift.records.verdict import CauseFound, Outcome, Probe, ProbeRecord, VerdictRecord

DOCTOR, AUDIT = "doctor", "audit"
ITEMS_OF_THEIR_OWN = (Probe.WEIGHT_SYNC, Probe.REWARDS)
"""Probes of the audit that the checklist shows beside it."""
_DIAGNOSED = {1: Status.FAIL, 3: Status.INCONCLUSIVE}
_CURABLE = (Severity.WRONG, Severity.RISK)


class JudgedTarget(NamedTuple):
    """One target of the doctor: what it is called on a command line, and the diagnosis or why there is none."""

    target: str
    diagnosis: Diagnosis | str
    key_env: str | None = None
    """The variable with the key that it wants."""

    @property
    def command(self) -> str:
        """What asks the doctor alone."""
        return f"zerodrift doctor {self.target}" + (f" --api-key-env {self.key_env}" if self.key_env else "")


def doctor_item(judged: Sequence[JudgedTarget]) -> Item:
    """The configuration, and the running server where there is one."""
    return Item(
        name=DOCTOR,
        status=worst(_diagnosed(each) for each in judged),
        message="; ".join(f"{each.target}: {_counted(each.diagnosis)}" for each in judged),
        details=tuple(line for each in judged for line in _findings(each.diagnosis)),
        type=tuple(
            f"{each.command}{' --fix' if _curable(each.diagnosis) else ''}"
            for each in judged
            if _diagnosed(each) is not Status.PASS
        ),
    )


def _diagnosed(judged: JudgedTarget) -> Status:
    diagnosis = judged.diagnosis
    if isinstance(diagnosis, str):
        return Status.INCONCLUSIVE
    at_risk = any(advice.severity is Severity.RISK for advice in diagnosis.findings)
    return _DIAGNOSED.get(diagnosis.exit_code, Status.WARN if at_risk else Status.PASS)


def _counted(diagnosis: Diagnosis | str) -> str:
    if isinstance(diagnosis, str):
        return diagnosis
    counts = ", ".join(diagnosis.counts()) or "nothing to say against them"
    return f"{len(diagnosis.settings)} settings, {counts}"


def _findings(diagnosis: Diagnosis | str) -> list[str]:
    if isinstance(diagnosis, str):
        return []
    found = [_found(advice) for advice in diagnosis.findings]
    return [*found, *(f"not judged: {text}" for text in diagnosis.not_judged)]


def _found(advice: Advice) -> str:
    cure = " ".join(advice.type) or advice.do
    return f"{advice.severity}: {advice.title} {advice.value}. {advice.message}{f' → {cure}' if cure else ''}"


def _curable(diagnosis: Diagnosis | str) -> bool:
    return not isinstance(diagnosis, str) and any(
        advice.severity in _CURABLE and advice.type for advice in diagnosis.findings
    )


def audit_item(verdict: VerdictRecord) -> Item:
    """Everything that the audit asked, but for what has an item of its own."""
    probes = [probe for probe in verdict.probes if probe.name not in ITEMS_OF_THEIR_OWN]
    causes = [each for each in verdict.causes if each.gating and each.found_by not in ITEMS_OF_THEIR_OWN]
    failed = [probe for probe in probes if probe.status is Outcome.FAIL]
    unanswered = [probe for probe in probes if probe.required and probe.status is Outcome.INCONCLUSIVE]
    status, message = _share(verdict, probes, causes), verdict.message
    typed: tuple[str, ...] = (verdict.reproduce,)
    if status is Status.FAIL:
        message = (
            f"{causes[0].cause}: {causes[0].evidence}" if causes else _told(failed[0]) if failed else message
        )
        typed = _fixes(causes) or typed
    elif status is Status.INCONCLUSIVE and unanswered:
        message = _told(unanswered[0])
    elif status is Status.PASS:
        message, typed = f"the same policy as the reference: {_parity(probes)}", ()
    return Item(
        name=AUDIT,
        status=status,
        message=message,
        details=tuple(f"{probe.name}, {probe.status.lower()}: {probe.message}" for probe in probes),
        facts=dict(verdict.metrics),
        type=typed,
    )


def _share(verdict: VerdictRecord, probes: Sequence[ProbeRecord], causes: Sequence[CauseFound]) -> Status:
    """The verdict, as the audit's item has it: less what it owes to a probe with an item of its own alone."""
    elsewhere = any(
        probe.name in ITEMS_OF_THEIR_OWN and probe.status is verdict.verdict for probe in verdict.probes
    )
    if verdict.verdict is Outcome.PASS or causes or not elsewhere:
        return Status(verdict.verdict)
    # The other item says what the verdict says. A verdict waits for required answers, and any failure decides it.
    return worst(
        [
            Status.PASS,
            *(Status(each.status) for each in probes if each.required or each.status is Outcome.FAIL),
        ]
    )


def _parity(probes: Sequence[ProbeRecord]) -> str:
    return next((probe.message for probe in probes if probe.name == Probe.PARITY), "every probe passed")


def _told(probe: ProbeRecord) -> str:
    return f"{probe.name}: {probe.message}"


def _fixes(causes: Sequence[CauseFound]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cause.fix for cause in causes))


def sync_item(verdict: VerdictRecord, without: str) -> Item:
    """Whether a weight update arrives; `without` is the command that leaves the question out."""
    probe = _probe(verdict, Probe.WEIGHT_SYNC)
    if probe is None:
        return not_run(Probe.WEIGHT_SYNC, AUDIT)
    fixes = _fixes([cause for cause in verdict.causes if cause.found_by == Probe.WEIGHT_SYNC])
    return _item(probe, {Outcome.FAIL: fixes, Outcome.INCONCLUSIVE: (without,)})


def rewards_item(verdict: VerdictRecord) -> Item:
    """Whether the task rewards the engine's answers as it does the reference's."""
    probe = _probe(verdict, Probe.REWARDS)
    if probe is None:
        return not_run(Probe.REWARDS, AUDIT)
    # They differ because something else does: what mends that mends them.
    fixes = _fixes([cause for cause in verdict.causes if cause.gating])
    # Rewards that could be compared, and were not, are all one: more of them would be the same.
    seen = msgspec.convert(dict(probe.evidence), RewardsEvidence) if probe.evidence else None
    all_one = seen is not None and seen.engine_mean is not None and seen.p is None
    enough = (
        "model.path: a checkpoint that solves the task now and then, or validation.task: another task"
        if all_one
        else "validation.equivalence_trials: a larger number"
    )
    return _item(
        probe,
        {
            Outcome.FAIL: fixes or (CAUSES[UNEXPLAINED].fix(verdict.engine.engine),),
            Outcome.INCONCLUSIVE: (enough,),
        },
    )


def rewards_of(verdict: VerdictRecord, when: str) -> Rewards | None:
    """The engine's rewards as a line of a history; None where there are too few to have a spread."""
    probe = _probe(verdict, Probe.REWARDS)
    if probe is None or not probe.evidence:
        return None
    seen = msgspec.convert(dict(probe.evidence), RewardsEvidence)
    if seen.engine_mean is None or seen.engine_std is None:
        return None
    return Rewards(task=seen.task, mean=seen.engine_mean, std=seen.engine_std, n=seen.prompts, when=when)


def not_run(name: str, because_of: str) -> Item:
    """What could not be asked, for an earlier item did not get that far."""
    return Item(name=name, status=Status.SKIPPED, message=f"not run: {because_of} did not get that far")


def left_out(name: str, why: str, typed: str) -> Item:
    """What nobody asked for; `typed` would."""
    return Item(name=name, status=Status.SKIPPED, message=why, type=(typed,))


def _probe(verdict: VerdictRecord, name: Probe) -> ProbeRecord | None:
    return next((probe for probe in verdict.probes if probe.name == name), None)


def _item(probe: ProbeRecord, typed: dict[Outcome, tuple[str, ...]]) -> Item:
    return Item(
        name=probe.name,
        status=Status(probe.status),
        message=probe.message,
        facts=dict(probe.evidence),
        type=typed.get(probe.status, ()),
    )
