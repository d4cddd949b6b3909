"""In what do two audited engines differ: in what their logprobs mean, in how large they are, or in which tokens they draw?

Each is asked of what was measured, never of settings: old releases show none, and new ones have more of them each time.
"""

from enum import StrEnum
from pathlib import Path

import msgspec

from zerodrift.core.cause import CAUSES, Layer
from zerodrift.core.errors import RecordError
from zerodrift.records.directory import SEALED, VERDICT, read_verdict
from zerodrift.records.verdict import FoundBy, Probe, VerdictRecord
from zerodrift.view.comparison import SameRequests, same_requests

LEAST_SHARED = 16
"""Tokens that both drew after the same tokens; with fewer, numbers are compared by the reference alone."""
PARTED = 0.05
"""Of tokens drawn after the same tokens. Logprobs that are off by d on average part at most d of them: bf16 1 in 100 at the
most, and another stream of random numbers as many as do not coincide, 29 in 100 for the built-in model at 0.5."""
PROCESSED = "processed logprobs"


class ChangeKind(StrEnum):
    """What may change, from what explains the rest to what explains nothing."""

    SEMANTICS = "semantics"
    """What the logprobs mean."""
    NUMBERS = "numbers"
    """How far they are from the reference, or from those of a neighbour."""
    SAMPLING = "sampling"
    """Which tokens a seed draws."""


class KindFound(msgspec.Struct, frozen=True, kw_only=True):
    """One kind, of two engines."""

    kind: ChangeKind
    differs: bool | None
    """None where it cannot be compared, which is no difference to follow."""
    says: str


def compare(before: Path, after: Path, names: tuple[str, str]) -> tuple[KindFound, ...]:
    """The runs in two directories, in every kind."""
    old, new = (read_verdict(directory, (VERDICT, *SEALED)) for directory in (before, after))
    weights = [record.reference.semantic.get("weights") for record in (old, new)]
    if weights[0] != weights[1]:
        raise RecordError(
            f"{before} and {after} were audited with other weights ({weights[0]}, {weights[1]}), so that their difference says "
            "nothing about the engine; begin again with another --out"
        )
    answers = same_requests(before, after)
    meaning = _semantics(old, new, names)
    return meaning, _numbers(old, new, answers, names, alike=not meaning.differs), _sampling(answers)


def not_judged(record: VerdictRecord) -> str:
    """Why an audit says nothing about its engine; empty where it does."""
    for probe in record.probes:
        if probe.name in (Probe.CONTRACT, Probe.PARITY) and probe.cut_off:
            return probe.message
    if "mean" not in record.metrics:
        found = [probe.message for probe in record.probes if probe.name in (Probe.CONTRACT, Probe.PARITY)]
        return "; ".join(found) or record.message
    return ""


def meaning_of(record: VerdictRecord) -> str:
    """What the logprobs of an engine are; named by the causes that predict every number."""
    causes = [
        cause.cause
        for cause in record.to_fix
        if CAUSES[cause.cause].layer is Layer.SEMANTIC and cause.found_by == FoundBy.VALUE
    ]
    return " and ".join(sorted(causes)) or PROCESSED


def _semantics(old: VerdictRecord, new: VerdictRecord, names: tuple[str, str]) -> KindFound:
    left, right = meaning_of(old), meaning_of(new)
    if left == right:
        return KindFound(kind=ChangeKind.SEMANTICS, differs=False, says=f"both: {left}")
    return KindFound(kind=ChangeKind.SEMANTICS, differs=True, says=f"{names[0]}: {left}, {names[1]}: {right}")


def _numbers(
    old: VerdictRecord,
    new: VerdictRecord,
    answers: SameRequests | None,
    names: tuple[str, str],
    *,
    alike: bool,
) -> KindFound:
    """Tokens that both drew after the same tokens have no luck in them, so that their logprobs are compared first."""
    if not alike:
        says = "not compared: numbers that mean two things are two numbers"
        return KindFound(kind=ChangeKind.NUMBERS, differs=None, says=says)
    gate = max(old.gates["mean"], new.gates["mean"])
    if answers is not None and answers.shared_tokens >= LEAST_SHARED:
        differs = answers.mean > gate
        says = f"{answers.mean:.2g} nats apart over {answers.shared_tokens:,} shared tokens, gate {gate:.2g}"
        return KindFound(kind=ChangeKind.NUMBERS, differs=differs, says=says)
    off = [record.metrics["mean"] > record.gates["mean"] for record in (old, new)]
    told = [f"{name} {record.metrics['mean']:.2g}" for name, record in zip(names, (old, new), strict=True)]
    says = f"mean |Δ| to the reference: {', '.join(told)}, gate {gate:.2g}"
    return KindFound(kind=ChangeKind.NUMBERS, differs=off[0] != off[1], says=says)


def _sampling(answers: SameRequests | None) -> KindFound:
    if answers is None:
        says = "not compared: no request in common"
        return KindFound(kind=ChangeKind.SAMPLING, differs=None, says=says)
    parted = answers.samples - answers.same_tokens
    share = parted / max(1, parted + answers.shared_tokens)
    says = f"{answers.same_tokens} of {answers.samples} answers to the same request and seed have the same tokens"
    return KindFound(kind=ChangeKind.SAMPLING, differs=share > PARTED, says=says)
