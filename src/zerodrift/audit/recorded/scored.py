"""A dump after one pass of the checkpoint: every number that later questions need, computed once."""

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerodrift.audit.measure import Measurement, Observed, measure
from zerodrift.audit.progress import Progress
from zerodrift.audit.recorded.notation_readings import (
    NotationReading,
    RecordedNumbers,
    accounts,
    bases,
    size,
    sizes_as_recorded,
)
from zerodrift.audit.recorded.shared_prompts import scoring_teacher
from zerodrift.audit.recorded.timeline import observer, timeline
from zerodrift.audit.recorded.told_precision import AS_FP32, Shown, ToldPrecision, decimal_step, precision_of
from zerodrift.backends.reference import ReferenceBackend
from zerodrift.backends.teacher import Teacher
from zerodrift.config.precision import Precision
from zerodrift.core.errors import ModelError
from zerodrift.core.version import WeightVersion
from zerodrift.records.recorded import RecordedRollout
from zerodrift.stats.arrays import Floats

CERTAIN = 0.05
"""Nats."""
LEAST = 4
"""Tokens that a median is taken of."""


class Stepwise(NamedTuple):
    """Every rollout by the checkpoint of its own step, and by that of the step before."""

    now: list[Measurement]
    before: Floats
    """Mean |Δ|; infinite in the first step, before which there is none."""


class Scoring(NamedTuple):
    """One pass over all tokens."""

    reference: ReferenceBackend
    observed: Sequence[Observed]
    progress: Progress

    def all(self) -> Sequence[Measurement]:
        """By the weights that are loaded."""
        return self._measured(range(len(self.observed)))

    def by_steps(self, rollouts: Sequence[RecordedRollout], checkpoints: Mapping[int, Path]) -> Stepwise:
        """Each checkpoint is loaded once, for the rollouts of its step and of the next one."""
        now: dict[int, Measurement] = {}
        before = np.full(len(rollouts), np.inf)
        steps = sorted(checkpoints)
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            self.progress.stage(f"score, step {step}")
            load_step(self.reference, checkpoints, step)
            own = [at for at, each in enumerate(rollouts) if each.step == step]
            now.update(zip(own, self._measured(own), strict=True))
            if following is not None:
                after = [at for at, each in enumerate(rollouts) if each.step == following]
                before[after] = [size(item.delta) for item in self._measured(after)]
        return Stepwise([now[at] for at in range(len(rollouts))], before)

    def _measured(self, which: Sequence[int]) -> Sequence[Measurement]:
        teacher = scoring_teacher(self.reference.model, self.reference.batch)
        stop_ids = self.reference.facts.eos_token_ids
        return measure(teacher, [self.observed[at] for at in which], stop_ids, self.progress.step)


def load_step(reference: ReferenceBackend, checkpoints: Mapping[int, Path], step: int) -> None:
    """The weights of `step` in the place of those that are loaded; another model is refused."""
    reference.load_weights(checkpoints[step], WeightVersion(str(step)))


class ScoredDump:
    """Rollouts with what the checkpoint makes of them, and the weights from before, where there are some."""

    def __init__(
        self,
        rollouts: Sequence[RecordedRollout],
        reference: ReferenceBackend,
        older: Teacher | None,
        progress: Progress,
        checkpoints: Mapping[int, Path] | None = None,
    ) -> None:
        """One forward for each rollout, and one more by the older weights.

        With a checkpoint for each step those of the step before are the older ones, and `reference` is left with the
        weights of the step that is furthest off: causes are looked for with these.
        """
        self.rollouts = rollouts
        self.order = timeline(rollouts)
        stop_ids = reference.facts.eos_token_ids
        observed = [observer(stop_ids)(rollout) for rollout in rollouts]
        progress.stage("score")
        began = time.monotonic()
        scoring = Scoring(reference, observed, progress)
        stepwise = None if checkpoints is None else scoring.by_steps(rollouts, checkpoints)
        self.measurements: Sequence[Measurement] = scoring.all() if stepwise is None else stepwise.now
        self.seconds_per_token = (time.monotonic() - began) / sum(item.length for item in observed)
        """Of scoring, prompts included: by it the time of what follows is told."""
        self.numbers = [
            RecordedNumbers(item.reported, item.contracted, rollout.sign_turned)
            for item, rollout in zip(self.measurements, rollouts, strict=True)
        ]
        self.sizes = sizes_as_recorded(self.numbers)
        """Mean |Δ| of every rollout."""
        under = None if older is None else _measured_under(older, observed, stop_ids, progress)
        self.older = None if under is None else np.array([size(item.delta) for item in under])
        """The same under the weights from before; infinite where there are none."""
        self.trainer_older = None if under is None else _trainer_sizes(rollouts, under)
        """Those of the trainer's numbers, where --previous names these weights."""
        self.checkpoints = checkpoints
        """Of each step; None where there is one for all."""
        self.of_reference: NDArray[np.bool_] = np.ones(len(rollouts), dtype=np.bool_)
        """Rollouts that the loaded weights should have made."""
        self.step: int | None = None
        """Whose weights are loaded, where each step has its own."""
        if checkpoints is not None and stepwise is not None:
            self.older = stepwise.before
            self.step = self._worst()
            self.of_reference = np.array([rollout.step == self.step for rollout in rollouts])
            load_step(reference, checkpoints, self.step)

    def _worst(self) -> int:
        """The step with the largest difference, of the engine or of the trainer; the first of those alike."""
        trainer = self.trainer_sizes
        sizes = np.maximum(self.sizes, np.where(np.isfinite(trainer), trainer, 0.0))
        means = [float(sizes[self.order.of_sequence == at].mean()) for at in range(len(self.order.labels))]
        return self.order.labels[int(np.argmax(means))]

    @cached_property
    def accounts(self) -> list[NotationReading]:
        """Other ways in which the numbers may be written."""
        return list(accounts(self.numbers, self.order))

    def precision(self, said: Precision | None) -> ToldPrecision:
        """The precision that the engine's numbers were computed in."""
        nats = np.array([float(np.abs(each.reported).mean()) for each in self.numbers])
        numbers = np.concatenate([each.reported for each in self.numbers])
        fitting = [
            self.sizes,
            np.array([_middle(each) for each in self.numbers]),
            *([] if self.older is None else [self.older]),
        ]
        told = precision_of(said, Shown(np.min(fitting, axis=0), nats, numbers))
        if told.known:
            return told
        fitting += [account.sizes for account in self.accounts]
        return precision_of(None, Shown(np.min(fitting, axis=0), nats, numbers))

    @property
    def all_of_one(self) -> bool:
        """Every number is that of the loaded weights, as it stands or written in another way, far nearer than an update
        moves it."""
        ways = [self.sizes, *(account.sizes for account in self.accounts)]
        return bool((np.min(ways, axis=0) <= AS_FP32).all())

    @cached_property
    def written_to(self) -> float:
        """The last decimal of the engine's numbers; 0 where all that fp32 has were written down."""
        return decimal_step(np.concatenate([each.reported for each in self.numbers]))

    @cached_property
    def trainer_written_to(self) -> float:
        """The last decimal of the trainer's."""
        return decimal_step(
            np.array([value for each in self.rollouts for value in each.trainer_logprobs or ()])
        )

    def trainer_precision(self, said: Precision | None) -> ToldPrecision | None:
        """That of the trainer's; None where there are none."""
        scored = [each for each in self.rollouts if each.trainer_logprobs is not None]
        if not scored:
            return None
        nats = np.array([float(np.abs(each.trainer_logprobs or (0.0,)).mean()) for each in self.rollouts])
        numbers = np.concatenate([np.array(each.trainer_logprobs) for each in scored])
        fitting = [self.trainer_sizes, *(account.sizes for account in self.trainer_accounts)]
        return precision_of(said, Shown(np.min(fitting, axis=0), nats, numbers))

    @cached_property
    def trainer_accounts(self) -> list[NotationReading]:
        """Other ways in which the trainer's numbers may be written; infinite where it has none."""
        has = [at for at, each in enumerate(self.rollouts) if each.trainer_logprobs is not None]
        numbers = [
            RecordedNumbers(np.array(self.rollouts[at].trainer_logprobs), self.measurements[at].contracted)
            for at in has
        ]
        found = []
        for account in bases(numbers):
            sizes = np.full(len(self.rollouts), np.inf)
            sizes[has] = account.sizes
            found.append(account._replace(sizes=sizes))
        return found

    @cached_property
    def trainer_sizes(self) -> Floats:
        """Mean |Δ| of the trainer's numbers; infinite where there are none."""
        return _trainer_sizes(self.rollouts, self.measurements)


def _trainer_sizes(rollouts: Sequence[RecordedRollout], measurements: Sequence[Measurement]) -> Floats:
    return np.array(
        [
            np.inf
            if rollout.trainer_logprobs is None
            else size(item.contracted - np.array(rollout.trainer_logprobs))
            for rollout, item in zip(rollouts, measurements, strict=True)
        ]
    )


def _middle(each: RecordedNumbers) -> float:
    """Median |Δ|, because padding behind an output leaves its other tokens right; of tokens that were no certainty, whose
    logprobs are zero in any precision."""
    open_ = each.contracted < -CERTAIN
    return (
        float(np.median(np.abs(each.contracted - each.reported)[open_])) if open_.sum() >= LEAST else np.inf
    )


def _measured_under(
    older: Teacher, observed: Sequence[Observed], stop_ids: Sequence[int], progress: Progress
) -> Sequence[Measurement]:
    if older.vocab_size <= max(max(item.completion.sequence) for item in observed):
        raise ModelError(f"the previous weights have {older.vocab_size} tokens, too few for these rollouts")
    progress.stage("score by previous")
    return measure(older, observed, stop_ids, progress.step)
