"""The training loop: rollouts are generated on the engine's thread while this one learns from those before.

A step: ask for the groups that there is room for, wait for the batch, take its gradients, hold every number against the
engine's, let the monitor judge, learn, publish. Which groups a step learns from, and which weights they were asked of, follows
from the configuration alone where updates drain what is in flight, and is recorded in any case.

To go on after a kill, and to replay, is the same loop: groups and steps that were recorded are taken from the record, done
again, and their digests compared.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from zerodrift.config.run import RunConfig
from zerodrift.core.errors import BitsDiffer, RecordError, TrainingHalted
from zerodrift.core.version import WeightVersion
from zerodrift.monitor.decision import Decision, Measured, State
from zerodrift.monitor.monitor import Monitor
from zerodrift.train.buffer import Batch, GroupBuffer
from zerodrift.train.checkpoint import write_checkpoint
from zerodrift.train.judged import judged
from zerodrift.train.learner import Learner, Learnt, WeighedRollout
from zerodrift.train.prompts import PromptStream
from zerodrift.train.records import GroupRecord, RunFiles, StepRecord
from zerodrift.train.rescore import RescoredBatch, Rescorer
from zerodrift.train.rewards import rewards_of
from zerodrift.train.source import RolloutSource


@dataclass
class Training:
    """One run, between two of its steps."""

    config: RunConfig
    files: RunFiles
    learner: Learner
    source: RolloutSource
    prompts: PromptStream
    buffer: GroupBuffer[GroupRecord]
    monitor: Monitor | None
    """None replays: nothing is generated, judged or written, and every recorded token is drawn again."""
    step: int = 0
    groups: Mapping[int, GroupRecord] = field(default_factory=dict)
    """That were recorded."""
    steps: Sequence[StepRecord] = ()
    """That were recorded; those from `step` on are done again."""

    def __post_init__(self) -> None:
        """Scores what the engine reports once more."""
        self._rescorer = Rescorer(self.source)
        self._kept_at = self.step

    def run(
        self,
        until: int,
        tell: Callable[[StepRecord], None] = lambda record: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Up to `until` steps in all; after the step that is under way, where `stopping` says so."""
        while self.step < until and not stopping():
            recorded = self.step < len(self.steps)
            record = self._one_step()
            tell(record)
            # A halt that was recorded is history: whoever resumes or replays the run has looked.
            halted = record.state is State.HALT and not recorded
            if self.step % self.config.train.checkpoint_every == 0 or halted:
                self.keep()
            if halted:
                raise TrainingHalted(
                    f"the monitor halted the training at step {record.step}; what it saw is in {self.files.directory}: "
                    "`zerodrift view` shows it, and --resume goes on once somebody has looked"
                )
        self.keep()

    def keep(self) -> None:
        """A checkpoint of now. Groups that are there by now belong to it: they were asked of weights that go."""
        if self.monitor is None or self._kept_at == self.step:
            return
        self._collect([index for index in self.buffer.pending if self.source.done(index)])
        write_checkpoint(self.files.directory, self.learner, self.step, self.buffer.first)
        self._kept_at = self.step

    def close(self) -> None:
        """Let go of engine and files; what is in flight is aborted, or waited for where it is a server's."""
        self.source.close()
        if self.monitor is not None:
            self.monitor.close()

    # --- one step ------------------------------------------------------------------------------------------------------

    def _one_step(self) -> StepRecord:
        began = time.perf_counter()
        expected = self.steps[self.step] if self.step < len(self.steps) else None
        taken = self._batch()
        groups = [group for _, group in taken.groups]
        batch = self.learner.sequences(groups)
        learnt = self.learner.gradients(batch)
        rescored = self._rescored(batch, learnt)
        if expected is None:
            assert self.monitor is not None, "a replay ends with what was recorded"
            self.files.keep_monitor(self.monitor.remembered)
            decision = judged(self.monitor, self.step, groups, learnt, rescored)
            trained = decision.train
        else:
            decision, trained = None, expected.trained
        norm = self._learn(batch, learnt) if trained else self._pass_over()
        self.step += 1
        version = self.source.publish(self.step)
        record = msgspec.structs.replace(
            _record(self.step - 1, taken, learnt, decision, version),
            trained=trained, grad_norm=norm, seconds=time.perf_counter() - began,
            rescored=rescored.tokens, mismatch=rescored.mean, mismatch_largest=rescored.largest,
        )  # fmt: skip
        if expected is None:
            self.files.keep_step(record)
            return record
        _require_same(expected, record)
        return expected

    def _batch(self) -> Batch[GroupRecord]:
        """Wait for it, in the order of indices, so that what is dropped does not depend on which came first."""
        while True:
            for index in self.buffer.ask():
                if index in self.groups:
                    self.buffer.put(index, self.groups[index])
                elif self.monitor is not None:
                    self.source.submit(index, self.prompts.prompt(index), self.prompts.sampling(index))
            if (batch := self.buffer.take(self.step)) is not None:
                return batch
            if self.monitor is None:
                raise RecordError(
                    f"step {self.step} needs a group that {self.files.directory} has no record of"
                )
            self._collect(self.buffer.needed)

    def _collect(self, indices: Sequence[int]) -> None:
        """Results, rewarded, on the disk, and then in the buffer."""
        found = []
        for index in indices:
            outputs, asked_at = self.source.result(index)
            rewards = rewards_of(
                self.prompts.task,
                index,
                self.prompts.prompt(index),
                outputs,
                self.config.train.reward_timeout_s,
            )
            found.append(GroupRecord(index=index, asked_at=asked_at, outputs=outputs, rewards=rewards))
        if found:
            self.files.keep_groups(found)
        for group in found:
            self.buffer.put(group.index, group)

    def _rescored(self, batch: Sequence[WeighedRollout], learnt: Learnt) -> RescoredBatch:
        outputs = [each.output for each in batch]
        if self.monitor is None:
            return self._rescorer.draw_again(outputs)
        costly = self.step % self.config.monitoring.check_interval_steps == 0
        one_in = 1 if costly else self.config.train.rescore_one_in
        return self._rescorer.check(outputs, learnt.logprobs, self.source.version, one_in)

    def _learn(self, batch: Sequence[WeighedRollout], first: Learnt) -> float:
        norm = self.learner.apply()
        for _ in range(self.config.train.epochs - 1):
            self.learner.gradients(batch, first.logprobs)
            norm = self.learner.apply()
        return norm

    def _pass_over(self) -> float:
        self.learner.discard()
        return 0.0


def _record(
    step: int, taken: Batch[GroupRecord], learnt: Learnt, decision: Decision | None, version: WeightVersion
) -> StepRecord:
    groups = [group for _, group in taken.groups]
    rewards = [value for group in groups for value in group.values()]
    total = None if decision is None else decision.total
    return StepRecord(
        step=step, groups=tuple(index for index, _ in taken.groups), dropped=taken.dropped, trained=True, digest=version.digest or "",
        state=State.OK if decision is None else decision.state, reward=sum(rewards) / len(rewards), loss=learnt.loss,
        grad_norm=0.0, clip_rate=learnt.clip_rate, kl=learnt.kl, entropy=None if decision is None else decision.entropy,
        ess=total.token_ess if isinstance(total, Measured) else None,
        engine_kl=total.k3 if isinstance(total, Measured) else None, lag=step - min(group.oldest for group in groups),
        tokens=sum(len(row) for row in learnt.logprobs), rescored=0, seconds=0.0,
    )  # fmt: skip


def _require_same(expected: StepRecord, found: StepRecord) -> None:
    """The same groups made the same weights."""
    for name in ("groups", "dropped", "digest"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if ours != theirs:
            raise BitsDiffer(
                f"step {expected.step} was recorded with {name} {theirs!s:.80}, and done again it has {ours!s:.80}; nothing "
                "more is trained: the record was changed, or something computes otherwise than it did"
            )
