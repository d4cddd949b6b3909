"""One side's recorded numbers against the reference: over all tokens, and step by step.

Three sides can be judged: the numbers that the engine reported, those that the trainer computed, and the samples
themselves. Each is bad if a gate breaks over the whole recording, or if the evidence step by step says so: a fault of
the last hour drowns in a mean over the night.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace as replace_fields

from zerodrift.audit.probes.parity import parity, samples
from zerodrift.audit.probes.result import ProbeResult, answered
from zerodrift.audit.recorded.copies import copies
from zerodrift.audit.recorded.dated import Dated
from zerodrift.audit.recorded.told_precision import ToldPrecision, strictest
from zerodrift.config.precision import Precision
from zerodrift.core.errors import RecordError
from zerodrift.drift.gates import LEAST_TOKENS, Gates
from zerodrift.drift.onset import Since, drift_since, odds, sampling_since
from zerodrift.drift.parity import compare
from zerodrift.drift.strata import Timeline
from zerodrift.drift.tokens import TokenTable
from zerodrift.records.evidence import OnsetEvidence, ParityEvidence
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome, Probe

VARIED = 0.01
"""Nats of deviation: a policy that is surer than that of every token may well have one number for all."""
SINCE = {
    Probe.PARITY: Probe.PARITY_SINCE,
    Probe.TRAINER: Probe.TRAINER_SINCE,
    Probe.SAMPLING: Probe.SAMPLING_SINCE,
}


class Side(NamedTuple):
    """What was found out about one side."""

    overall: ProbeResult
    since: Since | None
    """None where there was too little to bet on."""
    also: tuple[ProbeResult, ...] = ()
    """What else was asked about it, and does not decide."""
    dated: Dated | None = None
    """Since when, by the rollouts that a named cause explains."""

    @property
    def bad(self) -> bool:
        """The side left the reference."""
        failed = self.overall.status is Outcome.FAIL
        return failed or (self.since is not None and self.since.alarm)

    @property
    def results(self) -> list[ProbeResult]:
        """All answers, as probes."""
        return [self.overall, *([] if self.since is None else [_as_probe(self)]), *self.also]


class Sides(NamedTuple):
    """All sides that a dump lets one judge."""

    engine: Side
    samples: Side
    trainer: Side | None

    @property
    def results(self) -> list[ProbeResult]:
        """Every answer."""
        trainer = [] if self.trainer is None else self.trainer.results
        return [*self.engine.results, *self.samples.results, *trainer]

    @property
    def guilty(self) -> dict[str, Side]:
        """Bad sides by name. The sampler is one only where the reported numbers are right: else it is their consequence."""
        bad = {"engine": self.engine} if self.engine.bad else {}
        if self.trainer is not None and self.trainer.bad:
            bad["trainer"] = self.trainer
        if self.samples.bad and not self.engine.bad:
            bad["sampler"] = self.samples
        return bad


def judge_numbers(
    probe: Probe, table: TokenTable, order: Timeline, gates: Gates, rng: np.random.Generator
) -> Side:
    """Reported numbers against contracted ones."""
    # Without the engine's numbers there is no verdict; without the trainer's there still is one.
    overall = parity(table, gates, rng, probe, required=probe is Probe.PARITY)
    return Side(overall, drift_since(table, order, gates.mean))


def mean_of(side: Side) -> float | None:
    """Mean |Δ| of a side; None where there was too little to compare."""
    evidence = side.overall.evidence
    return evidence.mean if isinstance(evidence, ParityEvidence) else None


def undecided(
    side: Side,
    table: TokenTable,
    order: Timeline,
    told: ToldPrecision,
    rng: np.random.Generator,
    *,
    asked_previous: bool = False,
) -> Side:
    """What passes by gates that nobody vouches for is not decided, unless it passes by the strictest as well."""
    evidence = side.overall.evidence
    if (
        told.known
        or side.bad
        or side.overall.status is not Outcome.PASS
        or not isinstance(evidence, ParityEvidence)
    ):
        return side
    strict = strictest()
    if (
        compare(table, strict, rng).outcome is Outcome.PASS
        and not drift_since(table, order, strict.mean).alarm
    ):
        return side
    who = "trainer" if side.overall.probe is Probe.TRAINER else "engine"
    message = (
        f"mean |Δ| {evidence.mean:.3g} over {evidence.tokens} tokens is rounding if the {who} computed in "
        f"{told.precision}, and other weights or a fault if it computed in {Precision.FP32}: say which with --precision"
    )
    if not asked_previous:
        message += "; --previous CHECKPOINT tells whether these are older weights"
    overall = replace_fields(side.overall, status=Outcome.INCONCLUSIVE, message=message, required=True)
    return side._replace(overall=overall)


def judge_samples(table: TokenTable, order: Timeline, rollouts: Sequence[RecordedRollout]) -> Side:
    """Sampled tokens against the distribution that was asked for, greedy ones against the likeliest; copies say nothing.

    Where there are both kinds, the worse one decides, and the smaller one need not suffice for an answer.
    """
    greedy_of = np.array([rollout.sampling.greedy for rollout in rollouts])
    once = ~copies(rollouts)[table.sequence]
    taken = once & greedy_of[table.sequence]
    drawn = once & ~taken & np.isfinite(table.contracted)
    mostly_greedy = bool(taken.sum() > drawn.sum())
    by_taking = Side(samples(table.rows(taken), Probe.GREEDY, greedy=True, required=mostly_greedy), None)
    by_drawing = Side(
        samples(table.rows(drawn), greedy=False, required=not mostly_greedy),
        sampling_since(table, order, drawn) if drawn.any() else None,
    )
    if not taken.any():
        return by_drawing
    if not drawn.any():
        return by_taking
    worse, other = (
        (by_taking, by_drawing) if by_taking.bad and not by_drawing.bad else (by_drawing, by_taking)
    )
    return worse._replace(also=tuple(other.results))


def with_trainer(table: TokenTable, rollouts: Sequence[RecordedRollout]) -> TokenTable | None:
    """The tokens that the trainer scored as well, with its numbers in the engine's place; None where there are none."""
    has = np.array([rollout.trainer_logprobs is not None for rollout in rollouts])
    if not has.any():
        return None
    numbers = np.concatenate(
        [np.array(rollout.trainer_logprobs or (), dtype=np.float64) for rollout in rollouts]
    )
    return replace(table.rows(has[table.sequence]), reported=numbers)


def require_filled(table: TokenTable, trained: TokenTable | None) -> None:
    """One number for every token, where the reference has many, is a field that was never written: nothing to explain."""
    for name, numbers in (("logprobs", table), ("trainer_logprobs", trained)):
        if numbers is None or len(numbers.reported) < LEAST_TOKENS:
            continue
        # Under the requested parameters: after top-k 1 every logprob is 0, and rightly.
        own = numbers.contracted[np.isfinite(numbers.contracted)]
        varied = len(own) > 0 and float(np.std(own)) > VARIED
        if varied and np.ptp(numbers.reported) == 0:
            raise RecordError(
                f"all {len(numbers.reported):,} {name} of the dump are {numbers.reported[0]:g}, where the checkpoint's are spread "
                f"over {np.std(own):.2g} nats: the field was never filled in; write the numbers, or leave the field out"
            )


def agree(table: TokenTable, trainer: TokenTable, gates: Gates) -> bool:
    """Engine and trainer have the same numbers, whatever the reference makes of them."""
    scored = np.isin(table.sequence, np.unique(trainer.sequence))
    return float(np.abs(table.reported[scored] - trainer.reported).mean()) <= gates.mean


def _as_probe(side: Side) -> ProbeResult:
    assert side.since is not None, "asked only where there is an answer"
    since = side.since
    if side.dated is not None:
        known = side.dated
        decided = OnsetEvidence(
            log_e=since.log_e, unit=since.unit, first=known.first, affected=known.affected
        )
        return answered(SINCE[side.overall.probe], Outcome.FAIL, known.message, decided)
    affected = None if since.first is None else len(since.affected)
    evidence = OnsetEvidence(log_e=since.log_e, unit=since.unit, first=since.first, affected=affected)
    status = Outcome.FAIL if since.alarm else Outcome.PASS
    # The likeliest step of a healthy recording is one that happened to be a little worse than the others.
    message = since.message if side.bad else f"no {since.unit} stands out ({odds(since.log_e)})"
    return answered(SINCE[side.overall.probe], status, message, evidence)
