"""Do the scheduler's books agree? Run when the engine is idle, also in production: a wrong number is worse than a stop.

Every reference to a block has a holder, every sample one place, every block in flight somebody who computes it.
"""

from collections import Counter

from zerodrift.core.errors import InvariantBroken
from zerodrift.engine.sample import Phase, Sample
from zerodrift.engine.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise `InvariantBroken` where a scheduler between two steps contradicts itself."""
    scheduler.pool.check()
    scheduler.cache.check()
    _check_queues(scheduler)
    for sample in scheduler.samples:
        _check_sample(scheduler, sample)
    held = Counter(block for sample in scheduler.samples for block in sample.blocks)
    held.update(scheduler.releases_due)
    counted = {block: scheduler.pool.references(block) for block in held}
    if counted != held or scheduler.pool.num_held != len(held):
        wrong = {block: count for block, count in counted.items() if count != held[block]}
        raise InvariantBroken(
            f"{scheduler.pool.num_held} blocks are counted as held, but samples hold {len(held)}; references differ in "
            f"{wrong}, where samples hold { ({block: held[block] for block in wrong}) }"
        )


def _check_queues(scheduler: Scheduler) -> None:
    limits = scheduler.limits
    if len(scheduler.running) > limits.max_num_seqs:
        raise InvariantBroken(f"{len(scheduler.running)} samples run, and the bound is {limits.max_num_seqs}")
    for name, queue, phase in (
        ("running", scheduler.running, Phase.RUNNING),
        ("waiting", scheduler.waiting, Phase.WAITING),
    ):
        keys = [sample.key for sample in queue]
        if keys != sorted(set(keys)):
            raise InvariantBroken(f"the {name} samples are out of order: {keys}")
        if wrong := [sample.key for sample in queue if sample.phase is not phase]:
            raise InvariantBroken(f"samples {wrong} stand among the {name}, but are in another phase")
    queued = {sample.key for sample in (*scheduler.running, *scheduler.waiting)}
    led = {each.key for sample in scheduler.samples for each in sample.siblings}
    known = {sample.key for sample in scheduler.samples}
    if queued & led or queued | led != known:
        raise InvariantBroken(
            f"samples {sorted(known)} live, {sorted(queued)} are queued, {sorted(led)} wait for a sibling"
        )
    if orphaned := set(scheduler.blocks_in_flight.values()) - {sample.key for sample in scheduler.running}:
        raise InvariantBroken(f"samples {sorted(orphaned)} have KV blocks in flight and do not run")


def _check_sample(scheduler: Scheduler, sample: Sample) -> None:
    expected = scheduler.limits.blocks_for(sample.computed)
    if len(sample.blocks) != expected or sample.remaining < 1:
        raise InvariantBroken(
            f"sample {sample.key} has {len(sample.blocks)} blocks for {sample.computed} of {sample.length} tokens; "
            f"it needs {expected} blocks, and a token to forward"
        )


def dump(scheduler: Scheduler) -> dict[str, object]:
    """The books as plain values, for the report of a bug. Token ids stay out: they may be private."""
    return {
        "limits": {name: getattr(scheduler.limits, name) for name in type(scheduler.limits).__slots__},
        "counters": {name: getattr(scheduler.counters, name) for name in type(scheduler.counters).__slots__},
        "references": [scheduler.pool.references(block) for block in range(scheduler.pool.num_blocks)],
        "kept": sorted(scheduler.pool.kept),
        "running": [sample.key for sample in scheduler.running],
        "waiting": [sample.key for sample in scheduler.waiting],
        "samples": [
            {
                "key": sample.key,
                "phase": sample.phase.value,
                "computed": sample.computed,
                "length": sample.length,
                "blocks": list(sample.blocks),
                "siblings": [each.key for each in sample.siblings],
            }
            for sample in scheduler.samples
        ],
    }
