"""The scheduler against a naive model that generates one sample at a time, with a fake KV that remembers its origin.

The fake model writes, into each slot, everything that real KV depends on: weights, tenant, and all tokens up to the
position. Before a slice is run, every slot that it looks back on must hold exactly what the sample's own prefix says.
A block shared across a swap, freed too early or written twice shows up there at once.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from zerodrift.core.completion import FinishReason, Problem
from zerodrift.core.errors import InvariantBroken, OutOfBlocks, QueueFull
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine import consistency
from zerodrift.engine.blocks import BlockPool
from zerodrift.engine.limits import KVPolicy, Limits
from zerodrift.engine.plan import Drawn, Scored, Slice, StepPlan, StepResult
from zerodrift.engine.sample import Phase, Sample, ended_by_tokens
from zerodrift.engine.scheduler import Scheduler

VOCABULARY, EOS = 16, 15
WEIGHTS = [WeightVersion(name, name) for name in ("a", "b")]
# A quarter of the profile's examples: one example is a whole history of requests, steps, aborts and swaps.
MACHINE = settings(max_examples=settings().max_examples // 4, stateful_step_count=25, deadline=None)
# A planted bug only has to be found, not to be made small.
QUIET = settings(
    max_examples=400,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[HypothesisPhase.generate],
    derandomize=True,
)


def fake_token(weights: str, sample_index: int, tokens: tuple[int, ...]) -> int:
    """What the fake model draws: a pure function, as the noise and the logits of the real one are."""
    return hashlib.sha256(repr((weights, sample_index, tokens)).encode()).digest()[0] % VOCABULARY


class FakeRunner:
    """KV as a dictionary from slot to origin."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, Any] = {}

    def slot(self, part: Slice, position: int) -> int:
        return part.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, plan: StepPlan, scheduler: Scheduler) -> StepResult:
        assert len({copy.target for copy in plan.copies}) == len(plan.copies)
        moved = {
            copy.target * self.block_size + offset: self.slots.get(copy.source * self.block_size + offset)
            for copy in plan.copies
            for offset in range(self.block_size)
        }
        self.slots.update(moved)
        written = set()
        samples = {sample.key: sample for sample in scheduler.samples}
        for part in plan.slices:
            sample = samples[part.key]
            assert len(part.blocks) * self.block_size >= part.end
            for position in range(part.start, part.end):
                slot = self.slot(part, position)
                assert slot not in written, "two sequences write into one slot"
                written.add(slot)
                self.slots[slot] = self.origin(plan, sample, position)
        for part in plan.slices:
            sample = samples[part.key]
            for position in range(part.end):
                expected = self.origin(plan, sample, position)
                if sample.straddles:
                    expected = (self.slots[self.slot(part, position)] or expected)[:1] + expected[1:]
                assert self.slots[self.slot(part, position)] == expected, "a slice looks at foreign KV"
        return StepResult(self.draw(plan, samples), self.score(plan), {})

    @staticmethod
    def origin(plan: StepPlan, sample: Sample, position: int) -> tuple[Any, ...]:
        return (plan.version.digest, sample.salt, sample.tokens(0, position + 1))

    @staticmethod
    def draw(plan: StepPlan, samples: dict[int, Sample]) -> dict[int, Drawn | Problem]:
        return {
            draw.key: Drawn(
                fake_token(str(plan.version.digest), draw.sample_index, (*draw.prompt, *draw.output)),
                -1.0,
                (),
                None,
                (),
                0.5,
            )
            for part in plan.slices
            for draw in part.draws
        }

    @staticmethod
    def score(plan: StepPlan) -> dict[int, list[Scored]]:
        return {
            part.key: [Scored(-float(token), ()) for token in part.scored]
            for part in plan.slices
            if part.scored
        }


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, steps, aborts and swaps under random, tight limits."""

    plant: Callable[[Scheduler], None] = lambda self, scheduler: None

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler | None = None

    @precondition(lambda self: self.scheduler is None)
    @rule(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(4, 14),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(0, 8),
        caching=st.booleans(),
    )
    def start(self, block_size: int, num_blocks: int, max_num_seqs: int, budget: int, caching: bool) -> None:
        self.limits = Limits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            max_waiting=6,
            prefix_caching=caching,
        )
        self.scheduler = Scheduler(self.limits, WEIGHTS[0], lambda sample: ended_by_tokens(sample, [EOS]))
        self.plant(self.scheduler)
        self.runner = FakeRunner(block_size)
        self.number = 0
        self.live: dict[str, list[Sample]] = {}
        self.swaps: list[tuple[int, str]] = []
        self.waited: dict[int, int] = {}

    @precondition(lambda self: self.scheduler is not None)
    @rule(
        prompt=st.tuples(st.integers(0, 1), st.integers(1, 12)),
        salt=st.sampled_from([None, None, "tenant"]),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 10),
        scores=st.sampled_from([False, False, True]),
        copies=st.integers(1, 3),
    )
    def add(
        self, prompt: tuple[int, int], salt: str | None, n: int, max_tokens: int, scores: bool, copies: int
    ) -> None:
        """Prompts repeat one of two tokens, so that most of them begin alike."""
        for _ in range(copies):
            self.add_one((prompt[0],) * prompt[1], salt, n, max_tokens, scores)

    def add_one(
        self, prompt: tuple[int, ...], salt: str | None, n: int, max_tokens: int, scores: bool
    ) -> None:
        params = SamplingParams(n=n, max_tokens=max_tokens, seed=0, prompt_logprobs=0 if scores else None)
        leader = Sample(0, f"r{self.number}", 0, prompt, params, salt)
        self.number += 1
        if len(self.scheduler.waiting) >= self.limits.max_waiting:
            with pytest.raises(QueueFull):
                self.scheduler.add(leader)
        elif self.limits.blocks_for(len(prompt) + max_tokens - 1) > self.limits.num_blocks:
            with pytest.raises(OutOfBlocks):
                self.scheduler.add(leader)
        else:
            self.scheduler.add(leader)
            self.live[leader.request_id] = [leader, *leader.siblings]

    @precondition(lambda self: self.scheduler is not None)
    @rule(steps=st.integers(1, 3))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        scheduler = self.scheduler
        older = list(scheduler.running)
        decoding = [sample for sample in older if sample.remaining == 1]
        queued = list(scheduler.waiting)
        plan = scheduler.plan()
        self.check_order(queued)
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        self.check_fairness(plan, older, decoding)
        changed = scheduler.commit(plan, [self.runner.run(plan, scheduler)])
        assert len({sample.key for sample in changed}) == len(changed)
        for sample in changed:
            if sample.phase is Phase.FINISHED:
                self.finished(sample)
        consistency.check(scheduler)

    def check_order(self, queued: list[Sample]) -> None:
        """Nobody is overtaken, except by others while somebody computes the prefix that it needs."""
        admitted = [sample.key for sample in queued if sample.phase is Phase.RUNNING]
        for sample in queued:
            if sample.phase is Phase.WAITING and admitted and max(admitted) > sample.key:
                assert self.scheduler._is_in_flight(sample), f"sample {sample.key} was overtaken"

    def check_fairness(self, plan: StepPlan, older: list[Sample], decoding: list[Sample]) -> None:
        planned = {part.key for part in plan.slices}
        if self.live:
            assert planned, "there is work, and nothing is planned"
        if older:
            assert older[0].key in planned, "the oldest that runs stands still"
        for sample in decoding:
            assert sample.key in planned or sample.phase is Phase.WAITING, "a decode was left out"
        pushed_out = [sample.key for sample in older if sample.phase is Phase.WAITING]
        still = [sample.key for sample in older if sample.phase is Phase.RUNNING]
        assert not pushed_out or not still or min(pushed_out) > max(still), (
            "an older one gave way to a younger"
        )

    def finished(self, sample: Sample) -> None:
        """Its tokens are those that the fake model gives to it alone, under the recorded weights."""
        mates = self.live[sample.request_id]
        mates.remove(sample)
        if not mates:
            del self.live[sample.request_id]
        spans = [(span.version.digest, span.start, span.end) for span in sample.versions]
        versions = [digest for digest, start, end in spans for _ in range(start, end)]
        assert len(versions) == len(sample.output)
        for position, (token, weights) in enumerate(zip(sample.output, versions, strict=True)):
            before = (*sample.prompt, *sample.output[:position])
            assert token == fake_token(str(weights), sample.sample_index, before)
        if sample.finish_reason is FinishReason.STOP:
            assert sample.output[-1] == EOS
        elif sample.finish_reason is FinishReason.LENGTH:
            assert len(sample.output) == sample.sampling.max_tokens
        if sample.output and sample.sampling.prompt_logprobs is not None:
            assert [score.logprob for score in sample.prompt_scores] == [-float(t) for t in sample.prompt[1:]]
        if sample.output:
            assert sample.lineage[0].start == 0
            assert sample.lineage[-1].end == len(sample.prompt) + len(sample.output) - 1

    @precondition(lambda self: self.scheduler is not None and self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_one(data)
        consistency.check(self.scheduler)

    def abort_one(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        ended = self.scheduler.abort(request_id)
        assert {sample.key for sample in ended} == {sample.key for sample in self.live[request_id]}
        for sample in ended:
            self.finished(sample)

    @precondition(lambda self: self.scheduler is not None and self.live)
    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        """What the step in flight writes to belongs to nobody else before it is done."""
        plan = self.scheduler.plan()
        result = self.runner.run(plan, self.scheduler)
        self.abort_one(data)
        assert all(self.scheduler.pool.references(block) for part in plan.slices for block in part.blocks), (
            "a block is free, and a step in flight writes to it"
        )
        for sample in self.scheduler.commit(plan, [result]):
            if sample.phase is Phase.FINISHED:
                self.finished(sample)
        consistency.check(self.scheduler)

    @precondition(lambda self: self.scheduler is not None)
    @rule(version=st.sampled_from(WEIGHTS), policy=st.sampled_from(KVPolicy))
    def swap(self, version: WeightVersion, policy: KVPolicy) -> None:
        self.scheduler.swap(version, policy)
        consistency.check(self.scheduler)

    def teardown(self) -> None:
        """Everything comes to its end in as many steps as a naive engine would take, one request at a time."""
        if self.scheduler is None:
            return
        bound = sum(
            2 * (len(sample.prompt) + sample.sampling.max_tokens) + 2
            for mates in self.live.values()
            for sample in mates
        )
        for _ in range(bound):
            if not self.live:
                return
            self.step()
        assert not self.live, f"{list(self.live)} starve"

    @precondition(lambda self: self.scheduler is not None)
    @invariant()
    def idle_means_empty(self) -> None:
        if not self.live:
            assert self.scheduler.pool.num_held == 0
            assert not self.scheduler.samples


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = MACHINE


def forgets_a_reference(scheduler: Scheduler) -> None:
    scheduler.pool.release = lambda blocks: BlockPool.release(scheduler.pool, list(blocks)[1:])


def writes_into_shared_blocks(scheduler: Scheduler) -> None:
    scheduler._shares_tail = lambda sample: False


def shares_blocks_that_straddle_a_swap(scheduler: Scheduler) -> None:
    def swap(version: WeightVersion, policy: KVPolicy) -> None:
        Scheduler.swap(scheduler, version, policy)
        for sample in scheduler.samples:
            sample.straddles = False

    scheduler.swap = swap


def keeps_stale_kv(scheduler: Scheduler) -> None:
    def swap(version: WeightVersion, policy: KVPolicy) -> None:
        scheduler.version = version

    scheduler.swap = swap


def forgets_the_salt(scheduler: Scheduler) -> None:
    def keys(sample: Sample) -> list[bytes]:
        salt, sample.salt = sample.salt, None
        try:
            return Scheduler._keys(scheduler, sample)
        finally:
            sample.salt = salt

    scheduler._keys = keys


def starves_the_second_request(scheduler: Scheduler) -> None:
    def plan() -> StepPlan:
        full = Scheduler.plan(scheduler)
        kept = tuple(part for part in full.slices if part.key != 1 or len(full.slices) == 1)
        return StepPlan(full.version, kept, full.copies)

    scheduler.plan = plan


def preempts_the_oldest(scheduler: Scheduler) -> None:
    def victim(but: Sample | None = None) -> Sample:
        holders = [each for each in scheduler.waiting if each.blocks and each is not but] or scheduler.running
        return holders[0]

    scheduler._victim = victim


def admits_the_youngest_first(scheduler: Scheduler) -> None:
    def admit(budget: int, slices: list[Slice], copies: list[Any]) -> None:
        scheduler.waiting.reverse()
        Scheduler._admit(scheduler, budget, slices, copies)
        scheduler.waiting.sort(key=lambda sample: sample.key)

    scheduler._admit = admit


def forgets_blocks_in_flight(scheduler: Scheduler) -> None:
    def forget(sample: Sample) -> None:
        scheduler.pool.release(sample.forget())

    scheduler._forget = forget


def releases_while_a_step_writes(scheduler: Scheduler) -> None:
    scheduler.in_flight.release = scheduler.pool.release


def exceeds_the_budget(scheduler: Scheduler) -> None:
    def admit(budget: int, slices: list[Slice], copies: list[Any]) -> None:
        Scheduler._admit(scheduler, budget + 1, slices, copies)

    scheduler._admit = admit


@pytest.mark.parametrize(
    "bug",
    [
        forgets_a_reference,
        writes_into_shared_blocks,
        shares_blocks_that_straddle_a_swap,
        keeps_stale_kv,
        forgets_the_salt,
        starves_the_second_request,
        preempts_the_oldest,
        admits_the_youngest_first,
        forgets_blocks_in_flight,
        exceeds_the_budget,
        releases_while_a_step_writes,
    ],
)
def test_a_planted_bug_is_caught(bug: Callable[[Scheduler], None]) -> None:
    class Planted(SchedulerMachine):
        plant = lambda self, scheduler: bug(scheduler)  # noqa: E731

    with pytest.raises((AssertionError, InvariantBroken, ExceptionGroup)):
        run_state_machine_as_test(Planted, settings=QUIET)
