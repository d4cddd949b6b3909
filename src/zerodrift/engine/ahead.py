"""The next rounds, launched before the last ones are read: a GPU that waits for the host to plan idles a tenth of its time.

A step in which everybody decodes is followed by one in which everybody surely does, but for those that reach their end in
rounds not read yet: their seats are computed for nobody. Nothing of the next step depends on the host but where tokens
lie, since a round draws from the token before it, on the device. Whoever needs the books at rest (a swap, a check) drops the
step ahead: its tokens were never taken, and are drawn again, the same ones, because a draw is a function of seed and position.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zerodrift.engine.plan import TO_COME, Draw, Slice, StepPlan, StepResult
from zerodrift.engine.runner import Runner, Ticket
from zerodrift.engine.sample import Sample
from zerodrift.engine.scheduler import Scheduler
from zerodrift.sampler.prefix import Prefix

UNREAD = 3
"""Rounds that are left to read when the next step is launched: planning and launching take the time of one or two."""


class Step(NamedTuple):
    """One in flight."""

    plan: StepPlan
    ticket: Ticket


class Steps:
    """One after another, with at most one ahead."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.ahead: Step | None = None

    def next(self) -> Step | None:
        """The step that is ahead, else a new one; None where there is nothing to do."""
        if self.ahead is not None:
            step, self.ahead = self.ahead, None
            return step
        plan = self.scheduler.plan()
        return self._launched(plan) if plan.slices else None

    def rounds(self, step: Step) -> Iterator[StepResult]:
        """What each round of `step` gave; before the last of them are read, the next step is launched."""
        results, rounds = step.ticket.results(), step.plan.rounds
        for number in range(rounds):
            if rounds - number == min(UNREAD, rounds - 1):
                self._launch_ahead(step)
            if (result := next(results, None)) is None:
                return
            yield result

    def drop(self) -> None:
        """As if the step ahead had never been planned. What it still writes, whoever gets its blocks writes over."""
        if self.ahead is None:
            return
        self.ahead = None
        self.scheduler.in_flight.landed()
        for sample in self.scheduler.running:
            needed = self.scheduler.limits.blocks_for(sample.computed)
            self.scheduler.pool.release(sample.blocks[needed:])
            del sample.blocks[needed:]

    def _launch_ahead(self, step: Step) -> None:
        plan = plan_ahead(self.scheduler, step.plan, self.runner.can_follow)
        if plan is not None:
            self.ahead = self._launched(plan, step.ticket)

    def _launched(self, plan: StepPlan, after: Ticket | None = None) -> Step:
        begin = time.perf_counter()
        ticket = self.runner.launch(plan, after)
        ticket.waited += time.perf_counter() - begin
        return Step(plan, ticket)


def plan_ahead(
    scheduler: Scheduler, plan: StepPlan, can_follow: Callable[[StepPlan, int, int], bool]
) -> StepPlan | None:
    """The step after `plan`, which is still in flight; None where somebody has something else to do than to decode, or
    where the runner cannot go on with so many sequences and blocks of theirs."""
    limits, pool = scheduler.limits, scheduler.pool
    if scheduler.waiting and len(scheduler.running) < limits.max_num_seqs:
        return None
    parts = {part.key: part for part in plan.slices}
    following: list[tuple[Sample, int, int, int]] = []
    for sample in scheduler.running:
        part = parts.get(sample.key)
        if part is None or sample.remaining != 1 or not scheduler.runs_ahead(sample):
            return None
        start = part.start + part.rounds
        # Who reaches the most tokens that it may have in the rounds to come goes no further.
        if (left := sample.tokens_left - (start - sample.computed)) > 0:
            rounds = min(limits.decode_rounds, left)
            new_blocks = limits.blocks_for(start + rounds) - len(sample.blocks)
            following.append((sample, start, rounds, new_blocks))
    needed = sum(new_blocks for *_, new_blocks in following)
    held = sum(len(sample.blocks) for sample, *_ in following)
    if not following or needed > pool.num_free + pool.num_idle:
        return None
    if not can_follow(plan, len(following), held + needed):
        return None
    scheduler.cache.make_room(needed)
    for sample, _, _, new_blocks in following:
        sample.blocks += [pool.allocate() for _ in range(new_blocks)]
    scheduler.in_flight.begin()
    scheduler.counters.steps += 1
    return StepPlan(plan.version, tuple(_slice(*each[:3]) for each in following), ())


def _slice(sample: Sample, start: int, rounds: int) -> Slice:
    drawn_before = len(sample.output) + start - sample.computed
    output = Prefix(sample.output, drawn_before)
    draw = Draw(sample.key, sample.sampling, sample.sample_index, sample.prompt, output, None)
    return Slice(sample.key, (TO_COME,), start, tuple(sample.blocks), (draw,), (), 0, rounds, sample.lora)
