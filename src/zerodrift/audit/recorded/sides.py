"""One side's recorded numbers against the reference: over all tokens, and step by step.

Three sides can be judged: the numbers that the engine reported, those that the trainer computed, and the samples
themselves. Each is bad if a gate breaks over the whole recording, or if the evidence step by step says so: a fault of
the last hour drowns in a mean over the night.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from zerodrift.audit.measure import TokenTable
from zerodrift.audit.probes.parity import Gates, fidelity, greedy, parity
from zerodrift.audit.probes.result import ProbeResult, answered
from zerodrift.audit.recorded.copies import copies
from zerodrift.audit.recorded.since import Since, drift_since, e_value, sampling_since
from zerodrift.audit.recorded.timeline import Timeline
from zerodrift.records.recorded import RecordedRollout
from zerodrift.records.verdict import Outcome


class Side(NamedTuple):
    """What was found out about one side."""

    overall: ProbeResult
    since: Since | None
    """None where there was too little to bet on."""
    also: tuple[ProbeResult, ...] = ()
    """What else was asked about it, and does not decide."""

    @property
    def bad(self) -> bool:
        """The side left the reference."""
        failed = self.overall.record.status is Outcome.FAIL
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
    name: str, table: TokenTable, order: Timeline, gates: Gates, rng: np.random.Generator
) -> Side:
    """Reported numbers against contracted ones."""
    # Without the engine's numbers there is no verdict; without the trainer's there still is one.
    overall = _named(parity(table, gates, rng), name, required=name == "parity")
    return Side(overall, drift_since(table, order, gates.mean))


def judge_samples(table: TokenTable, order: Timeline, rollouts: Sequence[RecordedRollout]) -> Side:
    """Sampled tokens against the distribution that was asked for, greedy ones against the likeliest; copies say nothing.

    Where there are both kinds, the worse one decides, and the smaller one need not suffice for an answer.
    """
    greedy_of = np.array([rollout.sampling.greedy for rollout in rollouts])
    once = ~copies(rollouts)[table.sequence]
    taken = once & greedy_of[table.sequence]
    drawn = once & ~taken & np.isfinite(table.contracted)
    likeliest, samples = greedy(rows_of(table, taken)), fidelity(rows_of(table, drawn))
    mostly_greedy = bool(taken.sum() > drawn.sum())
    by_taking = Side(_named(likeliest, "greedy", required=mostly_greedy), None)
    by_drawing = Side(
        _named(samples, "sampling", required=not mostly_greedy),
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


def _named(result: ProbeResult, name: str, *, required: bool) -> ProbeResult:
    record = msgspec.structs.replace(result.record, name=name, required=required)
    return ProbeResult(record, result.causes)


def rows_of(table: TokenTable, chosen: np.ndarray) -> TokenTable:
    """Some of the tokens."""
    return TokenTable(**{name: values[chosen] for name, values in vars(table).items()})


def with_trainer(table: TokenTable, rollouts: Sequence[RecordedRollout]) -> TokenTable | None:
    """The tokens that the trainer scored as well, with its numbers in the engine's place; None where there are none."""
    has = np.array([rollout.trainer_logprobs is not None for rollout in rollouts])
    if not has.any():
        return None
    numbers = np.concatenate(
        [np.array(rollout.trainer_logprobs or (), dtype=np.float64) for rollout in rollouts]
    )
    return replace(rows_of(table, has[table.sequence]), reported=numbers)


def agree(table: TokenTable, trainer: TokenTable, gates: Gates) -> bool:
    """Engine and trainer have the same numbers, whatever the reference makes of them."""
    scored = np.isin(table.sequence, np.unique(trainer.sequence))
    return float(np.abs(table.reported[scored] - trainer.reported).mean()) <= gates.mean


def _as_probe(side: Side) -> ProbeResult:
    assert side.since is not None, "asked only where there is an answer"
    since = side.since
    evidence: dict[str, float | int | str | bool] = {"log_e": since.log_e, "unit": since.unit}
    if since.first is not None:
        evidence |= {"first": since.first, "affected": len(since.affected)}
    status = Outcome.FAIL if since.alarm else Outcome.PASS
    # The likeliest step of a healthy recording is one that happened to be a little worse than the others.
    says = since.says if side.bad else f"no {since.unit} stands out (e = {e_value(since.log_e)})"
    return answered(f"{side.overall.record.name}-since", status, says, evidence)
