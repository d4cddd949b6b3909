"""The engine in numbers, as one value: what a dashboard shows and a test compares."""

from dataclasses import dataclass

import msgspec

from zerodrift.engine.runner import Runner
from zerodrift.engine.scheduler import Scheduler
from zerodrift.engine.spot_check import SpotCheck


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Now, and since the start. Fractions are NaN-free: 0 where nothing was counted."""

    waiting: int
    """Samples that wait for their turn."""
    running: int
    """Samples in the batch."""
    blocks_total: int
    blocks_held: int
    blocks_idle: int
    """Blocks whose content is kept for equal prefixes, and could be taken at once."""
    fragmentation: float
    """Empty slots of held blocks, as a fraction of all their slots."""
    prefix_hit_rate: float
    """Tokens found in the prefix cache, of those that were looked up."""
    preemptions: int
    steps: int
    forwarded_tokens: int
    sampled_tokens: int
    seconds: float
    """Spent in steps."""
    bookkeeping_seconds: float
    """Of these, outside of forward and draw: planning, where tokens lie, committing, making outputs."""
    sampled_per_second: float
    mean_batch_tokens: float
    """Tokens per step."""
    mean_entropy: float
    """Of the distributions that were sampled, in nats."""
    kv_bytes: int
    checked_samples: int
    """Finished samples that were scored again by another path, bit by bit."""
    unchecked_samples: int
    """Those whose turn it was, and that no single set of weights can score."""
    check_seconds: float
    """Spent on that, beside the steps."""


@dataclass(slots=True)
class Clock:
    """Where the time of all steps went."""

    steps: float = 0.0
    runs: float = 0.0
    """In the runner."""


def metrics_of(scheduler: Scheduler, clock: Clock, runner: Runner, spot_check: SpotCheck) -> EngineMetrics:
    """Read everything off a scheduler between two steps."""
    counters, pool = scheduler.counters, scheduler.pool
    return EngineMetrics(
        waiting=len(scheduler.waiting),
        running=len(scheduler.running),
        blocks_total=pool.num_blocks,
        blocks_held=pool.num_held,
        blocks_idle=pool.num_idle,
        fragmentation=_fragmentation(scheduler),
        prefix_hit_rate=_ratio(counters.reused_tokens, counters.queried_tokens),
        preemptions=counters.preemptions,
        steps=counters.steps,
        forwarded_tokens=counters.forwarded_tokens,
        sampled_tokens=counters.sampled_tokens,
        seconds=clock.steps,
        bookkeeping_seconds=clock.steps - clock.runs + runner.planning_seconds,
        sampled_per_second=_ratio(counters.sampled_tokens, clock.steps),
        mean_batch_tokens=_ratio(counters.forwarded_tokens, counters.steps),
        mean_entropy=_ratio(counters.entropy_sum, counters.sampled_tokens),
        kv_bytes=runner.kv.nbytes,
        checked_samples=spot_check.checked,
        unchecked_samples=spot_check.skipped,
        check_seconds=spot_check.seconds,
    )


def _fragmentation(scheduler: Scheduler) -> float:
    # Only a sample's last block can have empty slots, and samples that share it have filled it alike.
    size = scheduler.limits.block_size
    empty = {
        sample.blocks[-1]: len(sample.blocks) * size - sample.computed
        for sample in scheduler.samples
        if sample.blocks
    }
    return _ratio(sum(empty.values()), scheduler.pool.num_held * size)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
