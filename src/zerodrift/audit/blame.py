"""Which side is wrong, why, and since which step? Asked of recorded rollouts, with a checkpoint and no engine.

The reference scores every recorded token. The engine's numbers, the trainer's where the dump has them, and the samples
are each held against it; the side that leaves it is the guilty one. Where engine and trainer agree with each other and
not with the reference, the checkpoint is the odd one out, and nothing is judged. Causes are looked for in the bad steps
only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.counterfactual.binding import find_misbound
from zerodrift.audit.counterfactual.same_model import find_unrelated
from zerodrift.audit.diagnose import Suspect, diagnose
from zerodrift.audit.explain import attributed, by_samples_alone
from zerodrift.audit.floor import measure_floor, some_of
from zerodrift.audit.measure import Measurement, measure, tabulate
from zerodrift.audit.probes.result import ProbeResult, found
from zerodrift.audit.progress import Progress, Silent
from zerodrift.audit.recorded.conclude import conclude, side_in_words, since_in_words
from zerodrift.audit.recorded.reading import (
    dump_probe,
    fingerprint_of,
    parameters_probe,
    unstated,
    with_doubt,
)
from zerodrift.audit.recorded.sides import Side, Sides, agree, judge_numbers, judge_samples, with_trainer
from zerodrift.audit.recorded.timeline import Selection, observer, timeline
from zerodrift.audit.recorded.trainer import as_trainer, trainer_causes
from zerodrift.audit.recorded.weights import Suspected, compare_weights
from zerodrift.audit.response.signs import Signs, settled
from zerodrift.audit.run import verdict_record
from zerodrift.backends.reference import ReferenceBackend, load_reference
from zerodrift.backends.teacher import Layout, Teacher
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.drift.floor import ROUNDED_IN, Floor
from zerodrift.drift.gates import LEAST_TOKENS, Gates, gates_for
from zerodrift.drift.shape import describe, shape
from zerodrift.drift.strata import Timeline
from zerodrift.drift.tokens import TokenTable
from zerodrift.records import directory as files
from zerodrift.records.codec import write_atomically
from zerodrift.records.dump import Dump
from zerodrift.records.recorded import JudgedRollout, RecordedRollout
from zerodrift.records.tokens import write_tokens
from zerodrift.records.verdict import CauseFound, FoundBy, Probe, VerdictRecord
from zerodrift.stats.arrays import Floats

JUDGED = "judged.jsonl"
"""Beside the files of every run: which line of the dump each sequence is, and how far it is off."""
ENGINE = "recorded"
"""What the engine is called where nobody says which one it was; fixes are then in general words."""


OLDER_WEIGHTS = "--previous CHECKPOINT, which tells whether these are older weights"


class Found(NamedTuple):
    """Causes, further answers, and what the older weights make of each rollout."""

    causes: tuple[CauseFound, ...] = ()
    results: tuple[ProbeResult, ...] = ()
    previous: Mapping[int, float] = {}


@dataclass(frozen=True)
class Blamed:
    """The verdict, the tokens behind it, and the two answers that an audit does not give."""

    record: VerdictRecord
    table: TokenTable
    judged: tuple[JudgedRollout, ...]
    side: str
    since: str

    def write(self, directory: Path, decode: Callable[[list[int]], str]) -> None:
        """Leave a run directory that the report of an audit can be rendered from; `decode` makes text of token ids."""
        directory.mkdir(parents=True, exist_ok=True)
        files.write_verdict(directory, self.record)
        known = {token: decode([token]) for token in np.unique(self.table.token).tolist()}
        text = [known[token] for token in self.table.token.tolist()]
        write_tokens(directory / files.TOKENS, {**self.table.columns, "text": text})
        lines = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in self.judged)
        write_atomically(directory / JUDGED, lines)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What is judged, and by what."""

    dump: Dump
    reference: ReferenceBackend
    precision: Precision = Precision.BF16
    previous: str | Path | None = None
    """Checkpoint from before the update, to tell stale weights."""
    selection: Selection = field(default_factory=Selection)
    engine: str = ENGINE
    """Whose words the fixes are in."""
    seed: int = 0
    reproduce: str = ""
    """A command that asks again."""
    progress: Progress = field(default_factory=Silent)

    def run(self) -> Blamed:
        """Score, judge, attribute, conclude."""
        rng = np.random.default_rng(self.seed)
        rollouts = self.selection.of(self.dump.rollouts)
        measurements, floor = self._measure(rollouts)
        gates = gates_for(PROFILES[self.precision].gate, floor)
        table, order = tabulate(measurements, floor), timeline(rollouts)
        trained = with_trainer(table, rollouts)
        sides = Sides(
            judge_numbers(Probe.PARITY, table, order, gates, rng),
            judge_samples(table, order, rollouts),
            None if trained is None else judge_numbers(Probe.TRAINER, trained, order, gates, rng),
        )
        both = sides.guilty.keys() >= {"engine", "trainer"}
        same_numbers = both and trained is not None and agree(table, trained, gates)
        self.progress.stage("attribute")
        case = _Case(self, rollouts, measurements, order, floor, gates)
        known = case.causes(sides, rng, same_numbers=same_numbers)
        results = [
            dump_probe(self.dump, rollouts, self.selection.message, self.engine),
            parameters_probe(rollouts),
            *sides.results,
            *known.results,
        ]
        conclusion = conclude(
            sides, results, known.causes, same_numbers=same_numbers, silent=unstated(rollouts)
        )
        return Blamed(
            verdict_record(
                conclusion,
                fingerprint_of(self.dump, rollouts, self.engine),
                self.reference,
                self.precision,
                floor,
                gates,
                reproduce=self.reproduce,
            ),
            table,
            _judged(rollouts, measurements, known.previous),
            side_in_words(conclusion.guilty, sides),
            since_in_words(sides),
        )

    def _measure(self, rollouts: Sequence[RecordedRollout]) -> tuple[Sequence[Measurement], Floor]:
        stop_ids = self.reference.facts.eos_token_ids
        observed = [observer(stop_ids)(rollout) for rollout in rollouts]
        self.progress.stage("score")
        measurements = measure(self.reference.teacher, observed, stop_ids, self.progress.step)
        self.progress.stage("floor")
        some = some_of(observed)
        floor = measure_floor(
            self.reference.model,
            [item.passage for item in some],
            ROUNDED_IN[self.precision],
            sampled_with=[item.requested for item in some],
        )
        return measurements, floor


class _Case(NamedTuple):
    """The search for what made the bad steps bad."""

    blame: Blame
    rollouts: Sequence[RecordedRollout]
    measurements: Sequence[Measurement]
    order: Timeline
    floor: Floor
    gates: Gates

    def causes(self, sides: Sides, rng: np.random.Generator, *, same_numbers: bool) -> Found:
        """Causes of every bad side; the engine's alone where the trainer shows the same numbers."""
        guilty, known = sides.guilty, Found()
        for name in guilty.keys() & {"engine", "sampler"}:
            known = self._engine(guilty[name], rng)
            alone = by_samples_alone(sides.samples.overall, self.blame.engine)
            known = known._replace(causes=known.causes or alone)
        if "trainer" in guilty and not same_numbers:
            known = known._replace(causes=_joined(known.causes, self._trainer(guilty["trainer"], rng)))
        return known._replace(causes=with_doubt(known.causes, self.rollouts))

    def _engine(self, side: Side, rng: np.random.Generator) -> Found:
        members = self._members(side)
        older = self._compare_weights(members)
        if older.causes:
            return older
        chosen = [self.measurements[i] for i in members]
        if (swap := find_misbound(self.blame.reference.teacher, chosen, self.gates)) is not None:
            message = (
                f"{swap} (requests are numbered from 0 over the {len(chosen)} rollouts of the bad steps)"
            )
            causes = (found("semantic/misbound-output", self.blame.engine, FoundBy.VALUE, message),)
            return older._replace(causes=causes)
        attribution = diagnose(self._suspect, chosen, self.floor, self.gates, rng)
        if not attribution.explained_to_floor and (unrelated := self._unrelated(chosen)) is not None:
            causes = (found("weights/other-model", self.blame.engine, FoundBy.VALUE, unrelated),)
            return older._replace(causes=causes)
        told = describe(shape(tabulate(chosen, self.floor)))
        if self.blame.previous is None:
            told += "; whether these are older weights, --previous CHECKPOINT tells"
        # The profile is no sign: it has a default, and what it allows for is below the gate.
        signs = Signs(to_know=OLDER_WEIGHTS)
        named = attributed(attribution, self.blame.engine, told)
        return older._replace(causes=settled(named, signs, self.blame.engine))

    def _unrelated(self, chosen: Sequence[Measurement]) -> str | None:
        """Why these are the tokens of another model; a few bad steps may hold too few to tell."""
        if sum(len(item.delta) for item in chosen) < LEAST_TOKENS:
            return None
        reference = self.blame.reference
        return find_unrelated(reference.teacher, chosen, reference.facts.eos_token_ids)

    def _compare_weights(self, members: list[int]) -> Found:
        if self.blame.previous is None:
            return Found()
        reference = self.blame.reference
        dtype = str(reference.model.dtype).removeprefix("torch.")
        model = load_reference(self.blame.previous, dtype, reference.device).model
        older = Teacher(model, layout=Layout.PADDED, batch=reference.batch)
        suspected = Suspected([self.rollouts[i] for i in members], [self.measurements[i] for i in members])
        stop_ids = reference.facts.eos_token_ids
        answer = compare_weights(suspected, older, stop_ids, self.gates, self.blame.engine)
        means = dict(zip(members, answer.means, strict=True))
        return Found(answer.result.causes, (answer.result,), means)

    def _trainer(self, side: Side, rng: np.random.Generator) -> tuple[CauseFound, ...]:
        chosen = [
            as_trainer(self.rollouts[i], self.measurements[i])
            for i in self._members(side)
            if self.rollouts[i].trainer_logprobs is not None
        ]
        return trainer_causes(self._suspect, chosen, self.floor, self.gates, rng)

    def _members(self, side: Side) -> list[int]:
        """Rollouts of the bad steps; all where no step stands out."""
        if side.since is None or not side.since.affected:
            return list(range(len(self.rollouts)))
        bad = np.isin(self.order.of_sequence, side.since.affected)
        return np.flatnonzero(bad).tolist()

    @property
    def _suspect(self) -> Suspect:
        reference = self.blame.reference
        return Suspect(reference.model, reference.tokenizer, reference.facts)


def _joined(engine: Sequence[CauseFound], trainer: Sequence[CauseFound]) -> tuple[CauseFound, ...]:
    """Causes of both sides; one that both have is the engine's, and its evidence says so."""
    shared = {cause.cause for cause in engine} & {cause.cause for cause in trainer}
    return (
        *(
            msgspec.structs.replace(cause, evidence=f"{cause.evidence}, and so does the trainer")
            if cause.cause in shared
            else cause
            for cause in engine
        ),
        *(cause for cause in trainer if cause.cause not in shared),
    )


def _judged(
    rollouts: Sequence[RecordedRollout], measurements: Sequence[Measurement], previous: Mapping[int, float]
) -> tuple[JudgedRollout, ...]:
    return tuple(
        JudgedRollout(
            sequence=number,
            source=rollout.source,
            line=rollout.line,
            step=rollout.step,
            version=rollout.version,
            tokens=len(rollout.output),
            mean=_mean(item.delta),
            trainer_mean=None
            if rollout.trainer_logprobs is None
            else _mean(item.contracted - np.array(rollout.trainer_logprobs)),
            previous_mean=previous.get(number),
        )
        for number, (rollout, item) in enumerate(zip(rollouts, measurements, strict=True))
    )


def _mean(delta: Floats) -> float | None:
    """Mean |Δ|; an infinity cannot be written down."""
    size = float(np.abs(delta).mean())
    return size if np.isfinite(size) else None
