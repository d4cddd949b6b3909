"""Recorded rollouts in the order of training: which to judge, and to which step each belongs.

Where a dump numbers no steps, consecutive lines stand in for them, so many together that each block can say something
by itself; every answer then speaks of lines.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from zerodrift.audit.measure import Observed
from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.errors import RecordError
from zerodrift.core.version import VersionSpan, WeightVersion
from zerodrift.drift.strata import Timeline
from zerodrift.records.recorded import RecordedRollout

BLOCK_TOKENS = 200
"""Of a block of lines, where there are no steps: as many as the least that an audit judges by."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts of a dump are judged."""

    first: int | None = None
    last: int | None = None
    """Steps from `first` to `last`, both included."""
    version: str | None = None
    """Only rollouts that carry this label."""
    per_step: int | None = None
    """At most so many of each step, evenly spaced; None takes all."""
    positions: int | None = None
    """As many of each step as come to about so many tokens in all, prompts included; None takes all."""

    def of(self, rollouts: Sequence[RecordedRollout]) -> list[RecordedRollout]:
        """Those of `rollouts` that are asked for, in their order."""
        chosen = [rollout for rollout in rollouts if self._wants(rollout)]
        if not chosen:
            raise RecordError(
                f"none of {len(rollouts)} rollouts is asked for ({self.message}); widen --steps or --version"
            )
        order = timeline(chosen)
        most = min(self.per_step or len(chosen), self._within(chosen, len(order.labels)))
        kept: set[int] = set()
        for place in range(len(order.labels)):
            kept |= set(_spaced(np.flatnonzero(order.of_sequence == place).tolist(), most))
        return [rollout for number, rollout in enumerate(chosen) if number in kept]

    def _within(self, chosen: Sequence[RecordedRollout], steps: int) -> int:
        """How many of each step come to `positions`; one at least."""
        if self.positions is None:
            return len(chosen)
        mean = np.mean([len(rollout.prompt) + len(rollout.output) for rollout in chosen])
        return max(1, round(self.positions / steps / float(mean)))

    @property
    def message(self) -> str:
        """The selection in words; empty where everything is taken."""
        bounds = {"from step": self.first, "to step": self.last, "of version": self.version}
        told = [f"{word} {value}" for word, value in bounds.items() if value is not None]
        if self.per_step is not None:
            told.append(f"at most {self.per_step} of each step")
        if self.positions is not None:
            told.append(f"quick: of each step as many as come to {self.positions} tokens in all")
        return ", ".join(told)

    def _wants(self, rollout: RecordedRollout) -> bool:
        step, version = rollout.step, self.version
        if (self.first is not None or self.last is not None) and step is None:
            return False
        early = self.first is not None and step is not None and step < self.first
        late = self.last is not None and step is not None and step > self.last
        return not early and not late and version in (None, rollout.version)


def timeline(rollouts: Sequence[RecordedRollout]) -> Timeline:
    """Group by step, or by consecutive lines."""
    if rollouts[0].step is None:
        return _by_lines(rollouts)
    labels, of_sequence = np.unique([rollout.step for rollout in rollouts], return_inverse=True)
    return Timeline("step", tuple(labels.tolist()), of_sequence)


def _by_lines(rollouts: Sequence[RecordedRollout]) -> Timeline:
    labels, places, tokens = [rollouts[0].line], [], 0
    for rollout in rollouts:
        if tokens >= BLOCK_TOKENS:
            labels.append(rollout.line)
            tokens = 0
        places.append(len(labels) - 1)
        tokens += len(rollout.output)
    return Timeline("line", tuple(labels), np.array(places))


def _spaced(members: Sequence[int], most: int) -> Iterable[int]:
    if len(members) <= most:
        return members
    return [members[index] for index in np.linspace(0, len(members) - 1, most).round().astype(int)]


def observer(eos_ids: Sequence[int]) -> Callable[[RecordedRollout], Observed]:
    """Recorded rollouts as the measurement takes them."""

    def observe(rollout: RecordedRollout) -> Observed:
        ended = FinishReason.STOP if rollout.output[-1] in eos_ids else FinishReason.LENGTH
        version = WeightVersion(rollout.version or "unknown")
        completion = Completion(
            prompt_token_ids=rollout.prompt,
            token_ids=rollout.output,
            logprobs=rollout.logprobs,
            kind=rollout.kind or LogprobKind.PROCESSED,
            sampling=rollout.sampling,
            finish_reason=rollout.finish_reason or ended,
            versions=(VersionSpan(version, 0, len(rollout.output)),),
            fingerprint="recorded",
        )
        return Observed(completion, rollout.sampling)

    return observe
