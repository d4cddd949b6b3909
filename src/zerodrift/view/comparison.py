"""What changed between two runs, and which part of it likely explains the numbers?

Fingerprints are compared before numbers: a mean |Δ| of two engines that mean different things by a logprob cannot be
compared at all. Each side is compared with itself (engine with engine, reference with reference), since either can
move the difference between them.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import msgspec

from zerodrift.config.document import parse
from zerodrift.core.completion import EngineFingerprint
from zerodrift.records.codec import read_lines
from zerodrift.records.directory import CONFIG, ROLLOUTS, read_verdict
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.view.run_directory import document, flattened

# FAIL is the worst: a run that could not judge found nothing wrong, and a failed one did.
_BADNESS = {Outcome.PASS: 0, Outcome.INCONCLUSIVE: 1, Outcome.FAIL: 2}
# Settings of the engine are not questions: what is in force is in its fingerprint, and what was asked for is not.
_QUESTIONS = ("sampling_defaults", "validation")
_FLAGS = ("--sync", "--no-reset-cache")
_INJECT = "--inject"
_STATISTICS = {
    "mean |Δ|": ("metrics", "mean"),
    "p90 |Δ|": ("metrics", "p90"),
    "k3": ("metrics", "k3"),
    "max |Δ|": ("metrics", "max"),
    "floor": ("floor", "mean"),
    "gate": ("gates", "mean"),
    "token ESS": ("metrics", "token_ess"),
    "sequence ESS": ("metrics", "sequence_ess"),
    "tokens": ("metrics", "tokens"),
}


class Part(StrEnum):
    """Which kind of fact changed, from the one that explains most to the one that must explain nothing."""

    SEMANTIC = "semantic"
    """What the numbers mean."""
    QUESTIONS = "questions"
    """What the audit asked: sampling, prompts, seeds, gates."""
    NUMERIC = "numeric"
    """How they are computed."""
    DEPLOYMENT = "deployment"
    """Where they are computed."""


class FactChange(msgspec.Struct, frozen=True, kw_only=True):
    """A fact that is not in both runs alike; None where a run does not state it."""

    part: Part
    side: str
    """`engine`, `reference`, or `audit` for what belongs to neither."""
    name: str
    before: str | None
    after: str | None


class NumberChange(msgspec.Struct, frozen=True, kw_only=True):
    """One statistic in both runs; None where a run did not measure it."""

    name: str
    before: float | None
    after: float | None


class StatusChange(msgspec.Struct, frozen=True, kw_only=True):
    """A cause or a probe that ended otherwise; None where a run has none of that name."""

    name: str
    before: str | None
    after: str | None


class SameRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of two runs to the requests that both sent."""

    samples: int
    same_tokens: int
    """Samples with the same tokens in both."""
    shared_tokens: int
    """Tokens up to where two samples part: the same, after the same."""
    differing: int
    """Of the shared tokens, those whose logprob is not the same bits."""
    largest: float
    """Largest difference among those, in nats."""

    @property
    def message(self) -> str:
        """In one line."""
        if self.same_tokens == self.samples:
            tokens = f"all {self.samples} samples have the same tokens"
        elif self.same_tokens == 0:
            tokens = f"none of {self.samples} samples has the same tokens: a seed draws others now"
        else:
            tokens = f"{self.same_tokens} of {self.samples} samples have the same tokens"
        if not self.differing:
            return f"{tokens}; all {self.shared_tokens:,} logprobs up to where they part are the same bits"
        return (
            f"{tokens}; up to where they part {self.differing:,} of {self.shared_tokens:,} logprobs differ, "
            f"by {self.largest:.2g} at most"
        )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that differs, fingerprints first."""

    before: str
    """Name of the first run."""
    after: str
    facts: tuple[FactChange, ...]
    verdict_before: Outcome
    verdict_after: Outcome
    numbers: tuple[NumberChange, ...]
    """Every statistic that either run has, equal ones included."""
    causes: tuple[StatusChange, ...]
    probes: tuple[StatusChange, ...]
    answers: SameRequests | None = None
    """None where the runs have no request in common, or did not keep them."""

    @property
    def worse(self) -> bool:
        """The second run's verdict is worse than the first's."""
        return _BADNESS[self.verdict_after] > _BADNESS[self.verdict_before]

    @property
    def measured_alike(self) -> bool:
        """Every outcome and every number is the same, to the last bit."""
        return (
            self.verdict_before is self.verdict_after
            and not self.causes
            and not self.probes
            and all(number.before == number.after for number in self.numbers)
        )


def compare_runs(before: Path, after: Path) -> Comparison:
    """The runs in two directories; the second is the newer one by convention."""
    old, new = read_verdict(before), read_verdict(after)
    return Comparison(
        before=_name(before),
        after=_name(after),
        facts=_ordered([*_questions(before, after), *_facts(old, new)]),
        verdict_before=old.verdict,
        verdict_after=new.verdict,
        numbers=tuple(_numbers(old, new)),
        causes=_statuses(_causes(old), _causes(new)),
        probes=_statuses(_probes(old), _probes(new)),
        answers=same_requests(before, after),
    )


def _name(directory: Path) -> str:
    # As in the list of runs: a name that is not UTF-8 is shown with escapes.
    return directory.resolve().name.encode(errors="backslashreplace").decode()


def _ordered(facts: list[FactChange]) -> tuple[FactChange, ...]:
    """By part, and within a part first what both runs state; otherwise as they come."""
    parts = list(Part)
    return tuple(
        sorted(facts, key=lambda fact: (parts.index(fact.part), fact.before is None or fact.after is None))
    )


def _facts(old: VerdictRecord, new: VerdictRecord) -> Iterator[FactChange]:
    yield from _changes(Part.QUESTIONS, "audit", _typed(old), _typed(new))
    # The precision picks the gates: another one is another question.
    yield from _changes(Part.QUESTIONS, "audit", {"precision": old.precision}, {"precision": new.precision})
    part = Part.DEPLOYMENT if _same_weights(old, new) else Part.SEMANTIC
    yield from _changes(part, "audit", {"model": old.model}, {"model": new.model})
    moved = _moved(old, new)
    for change in _fingerprints("engine", old.engine, new.engine):
        elsewhere = change.part is Part.SEMANTIC and change.name in moved
        yield msgspec.structs.replace(change, part=Part.DEPLOYMENT) if elsewhere else change
    yield from _fingerprints("reference", old.reference, new.reference)


def _fingerprints(side: str, old: EngineFingerprint, new: EngineFingerprint) -> Iterator[FactChange]:
    # Another engine does not by itself mean something else, but no two engines round alike.
    yield from _changes(Part.NUMERIC, side, {"engine": old.engine}, {"engine": new.engine})
    yield from _changes(Part.SEMANTIC, side, old.semantic, new.semantic)
    yield from _changes(Part.NUMERIC, side, old.numeric, new.numeric)
    yield from _changes(Part.DEPLOYMENT, side, old.deployment, new.deployment)


def _changes(part: Part, side: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[FactChange]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield FactChange(part=part, side=side, name=name, before=old.get(name), after=new.get(name))


def _same_weights(old: VerdictRecord, new: VerdictRecord) -> bool:
    digests = [record.reference.semantic.get("weights") for record in (old, new)]
    return digests[0] is not None and digests[0] == digests[1]


def _moved(old: VerdictRecord, new: VerdictRecord) -> set[str]:
    """Names of the engine's facts that only say in which directory the same checkpoint lies.

    A built-in model is written into each run directory, so its path is another in every run; the reference has the
    digest of the weights. A tokenizer is covered where it lies beside them.
    """
    if not _same_weights(old, new):
        return set()
    one, other = old.engine.semantic, new.engine.semantic
    beside = all(facts.get("tokenizer") == facts.get("model") for facts in (one, other))
    return {"model", "tokenizer"} if beside else {"model"}


def _questions(before: Path, after: Path) -> Iterator[FactChange]:
    old, new = _settings(before), _settings(after)
    if old is None or new is None:
        # Somebody kept the verdict alone: that says nothing about single settings.
        there = [{} if settings is None else {CONFIG: "present"} for settings in (old, new)]
        yield from _changes(Part.QUESTIONS, "audit", *there)
    else:
        yield from _changes(Part.QUESTIONS, "audit", old, new)


def _settings(directory: Path) -> dict[str, str] | None:
    if (text := document(directory / CONFIG)) is None:
        return None
    tree = parse(text, str(directory / CONFIG))
    sections = tree if isinstance(tree, dict) else {}
    return dict(flattened({section: sections.get(section) for section in _QUESTIONS}))


def _typed(record: VerdictRecord) -> dict[str, str]:
    """Options of the command that no configuration holds."""
    words = record.reproduce.split()
    typed = {word: "given" for word in words if word in _FLAGS}
    for word, following in pairwise([*words, ""]):
        if word == _INJECT:
            typed[_INJECT] = following
        elif word.startswith(f"{_INJECT}="):
            typed[_INJECT] = word.removeprefix(f"{_INJECT}=")
    return typed


def _numbers(old: VerdictRecord, new: VerdictRecord) -> Iterator[NumberChange]:
    for name, (table, key) in _STATISTICS.items():
        before, after = getattr(old, table).get(key), getattr(new, table).get(key)
        if before is not None or after is not None:
            yield NumberChange(name=name, before=before, after=after)


def _causes(record: VerdictRecord) -> dict[str, str]:
    return {cause.cause: "fails" if cause.gating else "listed" for cause in record.causes}


def _probes(record: VerdictRecord) -> dict[str, str]:
    return {probe.name: "vacuous" if probe.vacuous else probe.status.value.lower() for probe in record.probes}


def _statuses(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[StatusChange, ...]:
    """In the order of the second run, then what only the first one had."""
    names = [*new, *(name for name in old if name not in new)]
    return tuple(
        StatusChange(name=name, before=old.get(name), after=new.get(name))
        for name in names
        if old.get(name) != new.get(name)
    )


def same_requests(before: Path, after: Path) -> SameRequests | None:
    """The runs in two directories; None where they have no request in common."""
    if not all((directory / ROLLOUTS).is_file() for directory in (before, after)):
        return None
    old, new = _rollouts(before), _rollouts(after)
    pairs = [
        (old[key], new[key])
        for key in old.keys() & new.keys()
        if old[key].request.prompt.token_ids == new[key].request.prompt.token_ids
        and old[key].request.sampling == new[key].request.sampling
    ]
    if not pairs:
        return None
    samples, shared = 0, list[tuple[float, float]]()
    for one, other in pairs:
        assert one.completion is not None, "only answers are kept"
        assert other.completion is not None, "only answers are kept"
        same = _parting(one.completion.token_ids, other.completion.token_ids)
        samples += one.completion.token_ids == other.completion.token_ids
        shared += zip(one.completion.logprobs[:same], other.completion.logprobs[:same], strict=True)
    gaps = [abs(one - other) for one, other in shared if one != other]
    return SameRequests(
        samples=len(pairs),
        same_tokens=samples,
        shared_tokens=len(shared),
        differing=len(gaps),
        largest=max(gaps, default=0.0),
    )


def _rollouts(directory: Path) -> dict[tuple[int, int], Rollout]:
    """Answers by request and sample."""
    return {
        (rollout.index, rollout.completion.sample_index): rollout
        for rollout in read_lines(directory / ROLLOUTS, Rollout)
        if rollout.completion is not None
    }


def _parting(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens come before the first that is not the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
