"""What changed between two runs, and which part of it likely explains the numbers?

Fingerprints are compared before numbers: a mean |Δ| of two engines that mean different things by a logprob cannot be
compared at all. Each side is compared with itself (engine with engine, reference with reference), since either can
move the difference between them.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from zerodrift.config.document import parse
from zerodrift.records.codec import read_lines
from zerodrift.records.directory import ASKED, CONFIG, ROLLOUTS, SEALED, VERDICT, read_verdict
from zerodrift.records.rollout import Rollout
from zerodrift.records.verdict import Outcome, VerdictRecord
from zerodrift.view.run_directory import document, flattened, json_facts

# FAIL is the worst: a run that could not judge found nothing wrong, and a failed one did.
_BADNESS = {Outcome.PASS: 0, Outcome.INCONCLUSIVE: 1, Outcome.FAIL: 2}
# Settings of the engine are not questions: what is in force is in its fingerprint, and what was asked for is not.
_QUESTIONS = ("sampling_defaults", "validation")
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


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A number, a cause or a probe in both runs; None where a run has none of that name."""

    name: str
    before: str | float | None
    after: str | float | None


class FactChange(Change, frozen=True, kw_only=True):
    """A fact that is not in both runs alike."""

    part: Part
    side: str
    """`engine`, `reference`, or `audit` for what belongs to neither."""


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
    mean: float
    """Mean difference of the shared tokens, equal ones included."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that differs, fingerprints first."""

    before: str
    """Name of the first run."""
    after: str
    facts: tuple[FactChange, ...]
    """By part, and within a part first what both runs state."""
    verdict_before: Outcome
    verdict_after: Outcome
    numbers: tuple[Change, ...]
    """Every statistic that either run has, equal ones included."""
    causes: tuple[Change, ...]
    probes: tuple[Change, ...]
    answers: SameRequests | None = None
    """None where the runs have no request in common, or did not keep them."""

    @property
    def worse(self) -> bool:
        """The second run's verdict is worse than the first's."""
        return _BADNESS[self.verdict_after] > _BADNESS[self.verdict_before]

    @property
    def measured_alike(self) -> bool:
        """Every outcome and every number is the same, to the last bit."""
        same = all(number.before == number.after for number in self.numbers)
        return same and self.verdict_before is self.verdict_after and not (self.causes or self.probes)


def compare_runs(before: Path, after: Path) -> Comparison:
    """The runs in two directories; the second is the newer one by convention."""
    directories = before, after
    old, new = (read_verdict(directory, (VERDICT, *SEALED)) for directory in directories)
    # As in the list of runs: a name that is not UTF-8 is shown with escapes.
    names = [path.resolve().name.encode(errors="backslashreplace").decode() for path in directories]
    facts = [*_facts(Part.QUESTIONS, "audit", *_questions(before, after)), *_fingerprints(old, new)]
    parts = list(Part)
    facts.sort(key=lambda fact: (parts.index(fact.part), None in (fact.before, fact.after)))
    measured = [
        Change(name=name, before=getattr(old, table).get(key), after=getattr(new, table).get(key))
        for name, (table, key) in _STATISTICS.items()
    ]
    return Comparison(
        before=names[0],
        after=names[1],
        facts=tuple(facts),
        verdict_before=old.verdict,
        verdict_after=new.verdict,
        numbers=tuple(each for each in measured if (each.before, each.after) != (None, None)),
        causes=tuple(_changes(_causes(old), _causes(new))),
        probes=tuple(_changes(_probes(old), _probes(new))),
        answers=same_requests(before, after),
    )


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """In the order of the second run, then what only the first one had."""
    return [
        Change(name=name, before=old.get(name), after=new.get(name))
        for name in {**new, **old}
        if old.get(name) != new.get(name)
    ]


def _facts(part: Part, side: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[FactChange]:
    changes = sorted(_changes(old, new), key=lambda change: change.name)
    return [FactChange(part=part, side=side, **msgspec.structs.asdict(change)) for change in changes]


def _fingerprints(old: VerdictRecord, new: VerdictRecord) -> list[FactChange]:
    # The precision picks the gates: another one is another question.
    facts = _facts(Part.QUESTIONS, "audit", {"precision": old.precision}, {"precision": new.precision})
    facts += _facts(Part.SEMANTIC, "audit", {"model": old.model}, {"model": new.model})
    for side in ("engine", "reference"):
        one, other = getattr(old, side), getattr(new, side)
        # Another engine does not by itself mean something else, but no two engines round alike.
        facts += _facts(Part.NUMERIC, side, {"engine": one.engine}, {"engine": other.engine})
        for part in (Part.SEMANTIC, Part.NUMERIC, Part.DEPLOYMENT):
            facts += _facts(part, side, getattr(one, part), getattr(other, part))
    moved = _moved(old, new)
    return [
        msgspec.structs.replace(fact, part=Part.DEPLOYMENT)
        if fact.part is Part.SEMANTIC and fact.side != "reference" and fact.name in moved
        else fact
        for fact in facts
    ]


def _moved(old: VerdictRecord, new: VerdictRecord) -> set[str]:
    """Names of facts that only say in which directory the same checkpoint lies.

    A built-in model is written into each run directory, so its path is another in every run; the reference has the
    digest of the weights. A tokenizer is covered where it lies beside them.
    """
    weights = {record.reference.semantic.get("weights") for record in (old, new)}
    if None in weights or len(weights) > 1:
        return set()
    engines = [record.engine.semantic for record in (old, new)]
    beside = all(facts.get("tokenizer") == facts.get("model") for facts in engines)
    return {"model", "tokenizer"} if beside else {"model"}


def _questions(*directories: Path) -> list[dict[str, str]]:
    """What was asked, in the configuration and beyond it: the fault planted, the update made."""
    settings = [_settings(directory) for directory in directories]
    asked = [json_facts(directory / ASKED) for directory in directories]
    for beyond in asked:
        beyond.pop("weights", None)  # the reference's fingerprint has them
    if None in settings:
        # Somebody kept the verdict alone: that says nothing about single settings.
        return [{} if each is None else {CONFIG: "present"} for each in settings]
    kept = asked if all(asked) else [{}, {}]
    return [(each or {}) | beyond for each, beyond in zip(settings, kept, strict=True)]


def _settings(directory: Path) -> dict[str, str] | None:
    if (text := document(directory / CONFIG)) is None:
        return None
    tree = parse(text, str(directory / CONFIG))
    sections = tree if isinstance(tree, dict) else {}
    return dict(flattened({section: sections.get(section) for section in _QUESTIONS}))


def _causes(record: VerdictRecord) -> dict[str, str]:
    return {cause.cause: "fails" if cause.gating else "listed" for cause in record.causes}


def _probes(record: VerdictRecord) -> dict[str, str]:
    return {probe.name: "vacuous" if probe.vacuous else probe.status.value.lower() for probe in record.probes}


def same_requests(before: Path, after: Path) -> SameRequests | None:
    """The runs in two directories; None where they have no request in common."""
    if not all((directory / ROLLOUTS).is_file() for directory in (before, after)):
        return None
    old, new = _answers(before), _answers(after)
    pairs = [(old[key][1], new[key][1]) for key in old.keys() & new.keys() if old[key][0] == new[key][0]]
    if not pairs:
        return None
    shared = [
        (left, right)
        for one, other in pairs
        for left, right in zip(one[: _parting(one, other)], other, strict=False)
    ]
    gaps = [abs(left[1] - right[1]) for left, right in shared if left[1] != right[1]]
    return SameRequests(
        samples=len(pairs),
        same_tokens=sum(len(one) == len(other) == _parting(one, other) for one, other in pairs),
        shared_tokens=len(shared),
        differing=len(gaps),
        largest=max(gaps, default=0.0),
        mean=sum(gaps) / max(1, len(shared)),
    )


Sampled = list[tuple[int, float]]
"""Token ids with their logprobs."""


def _answers(directory: Path) -> dict[tuple[int, int], tuple[object, Sampled]]:
    """What was asked and what came, by request and sample."""
    found: dict[tuple[int, int], tuple[object, Sampled]] = {}
    for rollout in read_lines(directory / ROLLOUTS, Rollout):
        if (completion := rollout.completion) is not None:
            asked = rollout.request.prompt.token_ids, rollout.request.sampling
            sampled = list(zip(completion.token_ids, completion.logprobs, strict=True))
            found[rollout.index, completion.sample_index] = (asked, sampled)
    return found


def _parting(one: Sampled, other: Sampled) -> int:
    """How many tokens come before the first that is not the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a[0] != b[0]), min(len(one), len(other)))
