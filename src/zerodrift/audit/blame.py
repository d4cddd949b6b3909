"""Which side is wrong, why, and since which step? Asked of recorded rollouts, with a checkpoint and no engine.

The reference scores every recorded token. The engine's numbers, the trainer's where the dump has them, and the samples
are each held against it; the side that leaves it is the guilty one. Where engine and trainer agree with each other and
not with the reference, the checkpoint is the odd one out, and nothing is judged. Causes are looked for in the bad steps
only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from zerodrift.audit.diagnose import Suspect
from zerodrift.audit.floor import ROUGHLY, measure_floor, some_of
from zerodrift.audit.measure import tabulate
from zerodrift.audit.probes.result import ProbeResult
from zerodrift.audit.progress import Progress, Silent
from zerodrift.audit.record import verdict_record
from zerodrift.audit.recorded.by_parameters import told_by_parameters
from zerodrift.audit.recorded.checkpoints import Checkpoints
from zerodrift.audit.recorded.conclude import (
    NOTHING_TO_DATE,
    Parameters,
    conclude,
    of_the_previous,
    side_in_words,
    since_in_words,
)
from zerodrift.audit.recorded.next_command import ToType, commands
from zerodrift.audit.recorded.reading import dump_probe, fingerprint_of, parameters_probe, unstated
from zerodrift.audit.recorded.scored import ScoredDump
from zerodrift.audit.recorded.search import Found, Search
from zerodrift.audit.recorded.shared_prompts import scoring_teacher
from zerodrift.audit.recorded.sides import (
    Side,
    Sides,
    agree,
    judge_numbers,
    judge_samples,
    mean_of,
    require_filled,
    undecided,
    with_trainer,
)
from zerodrift.audit.recorded.timeline import Selection
from zerodrift.audit.recorded.told_precision import Scale, ToldPrecision, nearer_than_rounding, widened
from zerodrift.backends.reference import ReferenceBackend, load_reference
from zerodrift.backends.teacher import Teacher
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.drift.floor import ROUNDED_IN, Floor
from zerodrift.drift.gates import gates_for
from zerodrift.drift.strata import Timeline
from zerodrift.drift.tokens import TokenTable
from zerodrift.records import directory as files
from zerodrift.records.codec import write_atomically
from zerodrift.records.dump import Dump
from zerodrift.records.recorded import JudgedRollout
from zerodrift.records.tokens import write_tokens
from zerodrift.records.verdict import Outcome, Probe, VerdictRecord
from zerodrift.stats.arrays import Floats

JUDGED = files.JUDGED
"""Beside the files of every run: which line of the dump each sequence is, and how far it is off."""
FLOOR_PASSAGES = 8
"""Of a model that is no toy, in as many variants as take one forward each: all eight variants on twelve passages took as
long as scoring 96 rollouts of SmolLM2 (42 s of one core), token by token for the most part; this takes 13 s."""
MOST_VARIANTS = 8
ENGINE = "recorded"
"""What the engine is called where nobody says which one it was; fixes are then in general words."""


@dataclass(frozen=True)
class Blamed:
    """The verdict, the tokens behind it, and what an audit does not say."""

    record: VerdictRecord
    table: TokenTable
    judged: tuple[JudgedRollout, ...]
    precision: str
    """Whose gates were taken, and who says so."""
    to_type: tuple[ToType, ...] = ()
    """Where there was no verdict: the commands of which one leads to it."""

    @property
    def side(self) -> str:
        """The guilty one, in a sentence."""
        return self.record.side

    @property
    def since(self) -> str:
        """When it went wrong."""
        return self.record.since

    def write(self, directory: Path, decode: Callable[[list[int]], str]) -> None:
        """Leave a run directory that the report of an audit can be rendered from; `decode` makes text of token ids."""
        directory.mkdir(parents=True, exist_ok=True)
        known = {token: decode([token]) for token in np.unique(self.table.token).tolist()}
        text = [known[token] for token in self.table.token.tolist()]
        write_tokens(directory / files.TOKENS, {**self.table.columns, "text": text})
        lines = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in self.judged)
        write_atomically(directory / JUDGED, lines)
        files.write_verdict(directory, self.record)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What is judged, and by what."""

    dump: Dump
    reference: ReferenceBackend
    precision: Precision | None = None
    """None: told from the numbers."""
    previous: str | Path | None = None
    """Checkpoint from before the update, to tell stale weights."""
    checkpoints: Checkpoints | None = None
    """One for each step of the dump, whose weights the reference takes in turn; those of the step before are tried too."""
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
        places = None if self.checkpoints is None else self.checkpoints.of(rollouts)
        scored = ScoredDump(rollouts, self.reference, self._older(), self.progress, places)
        scale, trainer_scale = self._scales(scored)
        table = tabulate(scored.measurements, scale.floor)
        trained = with_trainer(table, rollouts)
        require_filled(table, trained)
        sides = Sides(
            self._judge(scale, Probe.PARITY, table, scored.order, rng),
            judge_samples(table, scored.order, rollouts),
            None
            if trained is None
            else self._judge(trainer_scale, Probe.TRAINER, trained, scored.order, rng),
        )
        both = sides.guilty.keys() >= {"engine", "trainer"}
        same_numbers = both and trained is not None and agree(table, trained, scale.gates)
        self.progress.stage("attribute")
        search = Search(scored, self.reference, self.engine, scale, trainer_scale, self._asked_previous)
        known = search.causes(sides, rng, same_numbers=same_numbers)
        sides = sides._replace(engine=sides.engine._replace(dated=search.dated(known, sides)))
        return self._concluded(search, sides, known, table, same_numbers=same_numbers)

    def _concluded(
        self, search: Search, sides: Sides, known: Found, table: TokenTable, *, same_numbers: bool
    ) -> Blamed:
        """One verdict of all that was found."""
        scale, rollouts = search.scale, search.scored.rollouts
        told = scale.told.message + nearer_than_rounding(
            scale.told.precision, mean_of(sides.engine), scale.floor.mean
        )
        results = [
            self._of_dump(search.scored, told, known),
            parameters_probe(rollouts),
            *sides.results,
            *known.results,
        ]
        parameters = Parameters(unstated(rollouts), known.in_force, known.by_numbers, known.in_trainer)
        conclusion = conclude(
            sides,
            results,
            known.causes,
            same_numbers=same_numbers,
            parameters=parameters,
            resolution=scale.gates.mean,
        )
        # Of checkpoints for each step it is the pattern that is one step late.
        odd = same_numbers and known.of_previous and conclusion.verdict is Outcome.INCONCLUSIVE
        theirs = str(self.previous) if odd and self.previous is not None else None
        if theirs is not None:
            conclusion = of_the_previous(conclusion)
        to_type = commands(self.reproduce, conclusion, sides, parameters, theirs)
        # A record has room for one command: the last, which passes nothing that is wrong.
        reproduce = to_type[-1].command if to_type else self.reproduce
        fingerprint = fingerprint_of(self.dump, rollouts, self.engine)
        # Metrics are those of the side that is wrong, and so is what they are held against.
        measured = search.trainer_scale if conclusion.guilty == "trainer" else scale
        # What may have been requested did not begin to go wrong; nor did rollouts of another checkpoint.
        since = NOTHING_TO_DATE if conclusion.unstated or theirs is not None else since_in_words(sides)
        record = verdict_record(
            conclusion,
            fingerprint,
            self.reference,
            measured.told.precision,
            measured.floor,
            measured.gates,
            reproduce=reproduce,
            side=side_in_words(conclusion.guilty, sides),
            since=since,
        )
        if self.checkpoints is not None:
            record = msgspec.structs.replace(record, model=self.checkpoints.pattern)
        return Blamed(record, table, _judged(search.scored), told, to_type)

    def _of_dump(self, scored: ScoredDump, told: str, known: Found) -> ProbeResult:
        fits = self.checkpoints is not None or scored.all_of_one or known.of_one_checkpoint
        judged_with = self._judged_with(scored)
        return dump_probe(self.dump, scored.rollouts, judged_with, self.engine, told, labels_fit=fits)

    def _judge(
        self, scale: Scale, probe: Probe, table: TokenTable, order: Timeline, rng: np.random.Generator
    ) -> Side:
        side = judge_numbers(probe, table, order, scale.gates, rng)
        return undecided(side, table, order, scale.told, rng, asked_previous=self._asked_previous)

    @property
    def _asked_previous(self) -> bool:
        return self.previous is not None or self.checkpoints is not None

    def _judged_with(self, scored: ScoredDump) -> str:
        """Which rollouts, and by which weights where there are several."""
        if self.checkpoints is None:
            return self.selection.message
        told = f"each by the checkpoint of its step; causes are looked for in step {scored.step}"
        return f"{self.selection.message}, {told}" if self.selection.message else told

    def _scales(self, scored: ScoredDump) -> tuple[Scale, Scale]:
        """By what the engine and the trainer are judged; each by its own precision, as far as that is known."""
        told = scored.precision(self.precision)
        if not told.known:
            suspect = Suspect(self.reference.model, self.reference.tokenizer, self.reference.facts)
            own = [
                item for item, is_own in zip(scored.measurements, scored.of_reference, strict=True) if is_own
            ]
            told = told_by_parameters(suspect, own, self.seed) or told
        floor = self._floor(scored, told.precision)
        scale = _scale(told, floor, scored.written_to)
        trainer = scored.trainer_precision(self.precision)
        if trainer is None:
            return scale, scale
        if trainer.precision is not told.precision:
            floor = self._floor(scored, trainer.precision)
        return scale, _scale(trainer, floor, scored.trainer_written_to)

    def _older(self) -> Teacher | None:
        """The weights from before, in the precision of the reference."""
        if self.previous is None:
            return None
        self.progress.stage("load previous")
        dtype = str(self.reference.model.dtype).removeprefix("torch.")
        model = load_reference(self.previous, dtype, self.reference.device).model
        return scoring_teacher(model, self.reference.batch)

    def _floor(self, scored: ScoredDump, precision: Precision) -> Floor:
        some = some_of([item.observed for item in scored.measurements])
        variants = None
        if self.reference.model.dtype is not torch.float64:
            some = some[:: max(1, len(some) // FLOOR_PASSAGES)][:FLOOR_PASSAGES]
            variants = ROUGHLY
        tokens = sum(item.length for item in some) * (1 + (variants or MOST_VARIANTS))
        self.progress.stage(f"floor, {tokens * scored.seconds_per_token:.0f} s")
        return measure_floor(
            self.reference.model,
            [item.passage for item in some],
            ROUNDED_IN[precision],
            variants,
            sampled_with=[item.requested for item in some],
        )


def _scale(told: ToldPrecision, floor: Floor, written_to: float) -> Scale:
    gates = gates_for(PROFILES[told.precision].gate, floor)
    return Scale(told, floor, widened(gates, written_to))


def _judged(scored: ScoredDump) -> tuple[JudgedRollout, ...]:
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
            previous_mean=None if scored.older is None else _finite(float(scored.older[number])),
        )
        for number, (rollout, item) in enumerate(zip(scored.rollouts, scored.measurements, strict=True))
    )


def _mean(delta: Floats) -> float | None:
    """Mean |Δ|."""
    return _finite(float(np.abs(delta).mean()))


def _finite(size: float) -> float | None:
    """An infinity cannot be written down."""
    return size if np.isfinite(size) else None
