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

from zerodrift.audit.floor import ROUGHLY, measure_floor, some_of
from zerodrift.audit.measure import tabulate
from zerodrift.audit.progress import Progress, Silent
from zerodrift.audit.recorded.conclude import conclude, side_in_words, since_in_words
from zerodrift.audit.recorded.reading import dump_probe, fingerprint_of, parameters_probe, unstated
from zerodrift.audit.recorded.scored import Scored
from zerodrift.audit.recorded.search import Search
from zerodrift.audit.recorded.shared_prompts import scoring_teacher
from zerodrift.audit.recorded.sides import Sides, agree, judge_numbers, judge_samples, with_trainer
from zerodrift.audit.recorded.timeline import Selection
from zerodrift.audit.run import verdict_record
from zerodrift.backends.reference import ReferenceBackend, load_reference
from zerodrift.backends.teacher import Teacher
from zerodrift.config.precision import PROFILES, Precision
from zerodrift.drift.floor import ROUNDED_IN, Floor
from zerodrift.drift.gates import gates_for
from zerodrift.drift.tokens import TokenTable
from zerodrift.records import directory as files
from zerodrift.records.codec import write_atomically
from zerodrift.records.dump import Dump
from zerodrift.records.recorded import JudgedRollout
from zerodrift.records.tokens import write_tokens
from zerodrift.records.verdict import Probe, VerdictRecord
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
    """The verdict, the tokens behind it, and the two answers that an audit does not give."""

    record: VerdictRecord
    table: TokenTable
    judged: tuple[JudgedRollout, ...]
    side: str
    since: str
    precision: str
    """Whose gates were taken, and who says so."""

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
        scored = Scored(rollouts, self.reference, self._older(), self.progress)
        told = scored.precision(self.precision)
        floor = self._floor(scored, told.precision)
        gates = gates_for(PROFILES[told.precision].gate, floor)
        table = tabulate(scored.measurements, floor)
        trained = with_trainer(table, rollouts)
        sides = Sides(
            judge_numbers(Probe.PARITY, table, scored.order, gates, rng),
            judge_samples(table, scored.order, rollouts),
            None if trained is None else judge_numbers(Probe.TRAINER, trained, scored.order, gates, rng),
        )
        both = sides.guilty.keys() >= {"engine", "trainer"}
        same_numbers = both and trained is not None and agree(table, trained, gates)
        self.progress.stage("attribute")
        search = Search(scored, self.reference, self.engine, floor, gates, self.previous is not None)
        known = search.causes(sides, rng, same_numbers=same_numbers)
        sides = sides._replace(engine=sides.engine._replace(dated=search.dated(known, sides)))
        results = [
            dump_probe(self.dump, rollouts, self.selection.message, self.engine, told.message),
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
                told.precision,
                floor,
                gates,
                reproduce=self.reproduce,
            ),
            table,
            _judged(scored),
            side_in_words(conclusion.guilty, sides),
            since_in_words(sides),
            told.message,
        )

    def _older(self) -> Teacher | None:
        """The weights from before, in the precision of the reference."""
        if self.previous is None:
            return None
        self.progress.stage("load previous")
        dtype = str(self.reference.model.dtype).removeprefix("torch.")
        model = load_reference(self.previous, dtype, self.reference.device).model
        return scoring_teacher(model, self.reference.batch)

    def _floor(self, scored: Scored, precision: Precision) -> Floor:
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


def _judged(scored: Scored) -> tuple[JudgedRollout, ...]:
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
            previous_mean=None if scored.older is None else float(scored.older[number]),
        )
        for number, (rollout, item) in enumerate(zip(scored.rollouts, scored.measurements, strict=True))
    )


def _mean(delta: Floats) -> float | None:
    """Mean |Δ|; an infinity cannot be written down."""
    size = float(np.abs(delta).mean())
    return size if np.isfinite(size) else None
