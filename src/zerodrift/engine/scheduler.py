"""Who goes next? First come, first served, many at a time, within a budget of tokens and a pool of KV blocks.

Promises, each kept by `tests/property/test_engine_scheduler.py`:
- every running sample that decodes gets its token in every step, and the oldest one that prefills gets a chunk;
- memory is taken from those that wait with blocks in hand, then from the youngest that run, never from an older one;
- a waiting sample is overtaken only while another computes the very prefix that it needs;
- the `n` samples of a request start from one prefill, and copy only the block that each writes into.
"""

import bisect
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter

from zerodrift.core.completion import FinishReason, Problem
from zerodrift.core.errors import DuplicateRequest, InvariantBroken, QueueFull, UnknownRequest
from zerodrift.core.version import WeightVersion
from zerodrift.engine.blocks import BlockPool
from zerodrift.engine.in_flight import InFlight
from zerodrift.engine.limits import Counters, KVPolicy, Limits
from zerodrift.engine.plan import Copy, Draw, Drawn, Slice, StepPlan, StepResult
from zerodrift.engine.prefix_cache import PrefixCache, chain, root
from zerodrift.engine.sample import Phase, Sample, expand
from zerodrift.sampler.prefix import Prefix

Ended = Callable[[Sample], FinishReason | None]
_AGE = attrgetter("key")


class Scheduler:
    """Plans steps and commits their results; owns every sample that is not finished."""

    def __init__(
        self,
        limits: Limits,
        version: WeightVersion,
        ended: Ended,
        runs_ahead: Callable[[Sample], bool] = lambda _: True,
    ) -> None:
        """`ended` says, after each token, whether a sample has come to its end; `runs_ahead`, whether one may get several."""
        self.limits, self.version = limits, version
        self.counters = Counters()
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool)
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self._ended, self.runs_ahead = ended, runs_ahead
        self.requests: dict[str, list[Sample]] = {}
        """Samples, finished ones too, of every request that is not finished as a whole."""
        self._samples: dict[int, Sample] = {}
        self.blocks_in_flight: dict[bytes, int] = {}
        """Keys of blocks that a running sample is about to compute, and which one it is."""
        self.in_flight = InFlight(self.pool)
        self._next_key = 0

    @property
    def samples(self) -> Collection[Sample]:
        """All that have not come to their end."""
        return self._samples.values()

    @property
    def releases_due(self) -> list[int]:
        """Blocks that nobody holds any more, and that a step in flight may still write to."""
        return self.in_flight.due

    def add(self, leader: Sample) -> None:
        """Queue a request: its first sample, made by the caller; the other n - 1 are made here."""
        if leader.request_id in self.requests:
            raise DuplicateRequest(
                f"a request called {leader.request_id!r} is not finished yet; give every request an id of its own"
            )
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} samples wait already, and the bound is {self.limits.max_waiting}; "
                "take results with step() first, or raise max_waiting"
            )
        self.limits.check_room(len(leader.prompt), leader.sampling.max_tokens)
        leader.key = self._next_key
        self._next_key += leader.sampling.n
        expand(leader, range(leader.key + 1, self._next_key))
        samples = [leader, *leader.siblings]
        self.requests[leader.request_id] = samples
        self._samples.update((sample.key, sample) for sample in samples)
        self.waiting.append(leader)

    def abort(self, request_id: str) -> list[Sample]:
        """End all unfinished samples of a request; they keep the tokens that they have."""
        if request_id not in self.requests:
            raise UnknownRequest(
                f"no unfinished request is called {request_id!r}; it ended, was aborted, or was never added"
            )
        samples = [each for each in self.requests[request_id] if each.phase is not Phase.FINISHED]
        for sample in samples:
            self._finish(sample, FinishReason.ABORT)
        return samples

    def plan(self) -> StepPlan:
        """The next step, in flight until it is committed or discarded; without slices when there is nothing to do."""
        if self.in_flight:
            raise InvariantBroken(
                "a step is in flight, whose slices would be planned again; commit or discard it first"
            )
        preempted, copies = self.counters.preemptions, list[Copy]()
        budget = self.limits.max_num_batched_tokens - sum(each.remaining == 1 for each in self.running)
        slices, most = [], self._rounds()
        for sample in list(self.running):
            decodes = sample.remaining == 1
            count, rounds = 1 if decodes else min(sample.remaining, budget), min(most, sample.tokens_left)
            # Oldest first: whoever is preempted on the way comes later in this loop.
            if sample.phase is Phase.RUNNING and count and self._reserve(sample, count + rounds - 1, copies):
                budget -= 0 if decodes else count
                slices.append(self._slice(sample, count, rounds))
        if self.counters.preemptions == preempted:
            self._admit(budget, slices, copies)
        if slices:
            self.counters.steps += 1
            self.in_flight.begin()
        return StepPlan(self.version, tuple(slices), tuple(copies))

    def commit(self, plan: StepPlan, results: Iterable[StepResult]) -> list[Sample]:
        """Take over what the rounds of the step in flight give, while later ones may still run; returns the samples that
        got a token or ended, oldest first."""
        if plan.version is not self.version:
            raise InvariantBroken(
                f"a step planned under weights {plan.version.label!r} was committed under {self.version.label!r}"
            )
        if plan.slices and not self.in_flight:
            raise InvariantBroken("a step came back that is not in flight; each is committed once")
        changed = []
        for number, result in enumerate(results):
            for part in plan.slices:
                # Some were aborted while the step ran, or ended in a round before: what came after is nobody's.
                if (leader := self._samples.get(part.key)) is not None:
                    changed += self._take_round(leader, part, number, result)
        if plan.slices:
            self.in_flight.landed()
        return changed

    def _take_round(self, leader: Sample, part: Slice, number: int, result: StepResult) -> list[Sample]:
        """What a round gave to a slice; returns the samples that the first one changed."""
        if number >= part.rounds:
            return []
        self.counters.forwarded_tokens += 1 if number else len(part.token_ids)
        if (problem := result.failed.get(part.key)) is not None:
            changed = [leader, *leader.siblings]
            for sample in changed:
                self._finish(sample, FinishReason.ERROR, problem)
            return [] if number else changed
        leader.write(part.end + number, self.version)
        self._publish(leader)
        if number:
            self._take(leader, result.drawn[leader.key])
            return []
        leader.prompt_scores += result.scored.get(part.key, ())
        return self._draw(leader, part, result)

    def discard(self) -> None:
        """No step in flight will be committed: blocks were planned for and never written, so all KV is recomputed."""
        while self.in_flight:
            self.in_flight.landed()
        self.swap(self.version)

    def swap(self, version: WeightVersion, policy: KVPolicy = KVPolicy.RECOMPUTE) -> None:
        """From the next step on, other weights. KV of the old ones is recomputed, or kept and never shared."""
        self.version = version
        self.blocks_in_flight.clear()
        for sample in self._samples.values():
            # Scores of one prompt come from one set of weights: who has some of them starts again either way.
            if policy is KVPolicy.RECOMPUTE or (sample.prompt_scores and not sample.output):
                self._forget(sample)
                if sample.phase is Phase.RUNNING:
                    sample.move(Phase.WAITING)
            sample.cache_keys = []
            sample.straddles = sample.computed > 0
        again = [sample for sample in self.running if sample.phase is Phase.WAITING]
        self.waiting = sorted([*self.waiting, *again], key=_AGE)
        self.running = [sample for sample in self.running if sample.phase is Phase.RUNNING]

    def _draw(self, leader: Sample, part: Slice, result: StepResult) -> list[Sample]:
        """Give each drawn token to its sample; siblings of the leader begin here."""
        drawing = [sample for draw in part.draws if (sample := self._samples.get(draw.key)) is not None]
        if drawing:
            leader.siblings = []
        for sample in (each for each in drawing if each is not leader):
            self._fork(leader, sample)
        for sample in drawing:
            self._take(sample, result.drawn[sample.key])
        return drawing

    def _take(self, sample: Sample, drawn: Drawn | Problem) -> None:
        """One more token, or the end."""
        if isinstance(drawn, Problem):
            self._finish(sample, FinishReason.ERROR, drawn)
            return
        sample.append(drawn, self.version)
        self.counters.sampled_tokens += 1
        self.counters.entropy_sum += drawn.entropy
        if (reason := self._ended(sample)) is not None:
            self._finish(sample, reason)

    def _fork(self, leader: Sample, sample: Sample) -> None:
        sample.start_from(leader)
        for block in sample.blocks:
            self.pool.share(block)
        if len(self.running) < self.limits.max_num_seqs:
            sample.move(Phase.RUNNING)
            bisect.insort(self.running, sample, key=_AGE)
        else:
            bisect.insort(self.waiting, sample, key=_AGE)

    def _rounds(self) -> int:
        """Tokens that everybody may decode in the next step: one where somebody does something else, could be admitted
        meanwhile, or would lose memory to those that run ahead."""
        most = self.limits.decode_rounds
        if most == 1 or (self.waiting and len(self.running) < self.limits.max_num_seqs):
            return 1
        if not all(sample.remaining == 1 and self.runs_ahead(sample) for sample in self.running):
            return 1
        ends = [(sample, sample.computed + min(most, sample.tokens_left)) for sample in self.running]
        needed = sum(self._new_blocks(sample, end) for sample, end in ends)
        return most if needed <= self.pool.num_free + self.pool.num_idle else 1

    def _slice(self, sample: Sample, count: int, rounds: int = 1) -> Slice:
        start, end = sample.computed, sample.computed + count
        drawing = [sample, *sample.siblings] if end == sample.length else []
        # Row p predicts token p + 1. A prefill that is forgotten starts over, scores included.
        scores = sample.sampling.prompt_logprobs is not None and not sample.output
        return Slice(
            sample.key,
            sample.tokens(start, end),
            start,
            tuple(sample.blocks),
            tuple(
                Draw(
                    each.key,
                    each.sampling,
                    each.sample_index,
                    each.prompt,
                    Prefix(each.output, len(each.output)),
                    each.next_forced,
                )
                for each in drawing
            ),
            sample.prompt[start + 1 : end + 1] if scores else (),
            sample.sampling.prompt_logprobs or 0,
            rounds,
            sample.lora,
        )

    def _reserve(self, sample: Sample, count: int, copies: list[Copy]) -> bool:
        """Blocks for the next `count` tokens, from others if need be; False where it had to give way itself."""
        while True:
            needed = self._new_blocks(sample, sample.computed + count)
            if self.pool.num_free + self.pool.num_idle >= needed:
                self._allocate(sample, needed, copies)
                return True
            victim = self._victim()
            self._preempt(victim)
            if victim is sample:
                return False

    def _new_blocks(self, sample: Sample, end: int) -> int:
        return self.limits.blocks_for(end) - len(sample.blocks) + self._shares_tail(sample)

    def _shares_tail(self, sample: Sample) -> bool:
        """Whether the next token falls into a block that a sibling looks at too."""
        index, offset = divmod(sample.computed, self.limits.block_size)
        return offset > 0 and self.pool.references(sample.blocks[index]) > 1

    def _allocate(self, sample: Sample, needed: int, copies: list[Copy]) -> None:
        self.cache.make_room(needed)
        if self._shares_tail(sample):
            index = sample.computed // self.limits.block_size
            shared, sample.blocks[index] = sample.blocks[index], self.pool.allocate()
            copies.append(Copy(shared, sample.blocks[index]))
            self.pool.release([shared])
            needed -= 1
        sample.blocks += [self.pool.allocate() for _ in range(needed)]

    def _victim(self, but: Sample | None = None) -> Sample:
        """The youngest that waits with blocks in hand, else the youngest that runs."""
        holders = [sample for sample in self.waiting if sample.blocks and sample is not but] or self.running
        if not holders:
            raise InvariantBroken("KV memory is short, and nobody holds any")
        return holders[-1]

    def _preempt(self, sample: Sample) -> None:
        self.counters.preemptions += 1
        sample.preemptions += 1
        self._forget(sample)
        if sample.phase is Phase.RUNNING:
            sample.move(Phase.WAITING)
            self.running.remove(sample)
            bisect.insort(self.waiting, sample, key=_AGE)

    def _admit(self, budget: int, slices: list[Slice], copies: list[Copy]) -> None:
        for sample in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.limits.max_num_seqs:
                return
            if self._is_in_flight(sample):
                continue
            while not self._fits(sample):
                if self.running:
                    return
                # Nobody runs, so those that wait with blocks in hand would wait for each other.
                self._preempt(self._victim(but=sample))
            self._reuse(sample)
            count = min(sample.remaining, budget)
            self._allocate(sample, self._new_blocks(sample, sample.computed + count), copies)
            budget -= count
            self.waiting.remove(sample)
            sample.move(Phase.RUNNING)
            bisect.insort(self.running, sample, key=_AGE)
            slices.append(self._slice(sample, count))

    def _fits(self, sample: Sample) -> bool:
        """Whether all its known tokens find room without preemption: half a prompt would only be thrown out again."""
        matched = self._matched(sample)
        revived = sum(self.pool.references(block) == 0 for block in matched)
        needed = self._new_blocks(sample, sample.length) - len(matched)
        return needed <= self.pool.num_free + self.pool.num_idle - revived

    def _reuse(self, sample: Sample) -> None:
        """Take what the cache has, and tell those who need the same that the rest is in flight."""
        if sample.blocks:
            return
        matched = self._matched(sample)
        for block in matched:
            self.pool.share(block)
        sample.blocks = matched
        if self._cacheable(sample):
            self.counters.queried_tokens += sample.length
            self.counters.reused_tokens += len(matched) * self.limits.block_size
            for key in sample.cache_keys[len(matched) :]:
                self.blocks_in_flight.setdefault(key, sample.key)
        sample.reuse(len(matched) * self.limits.block_size, self.version)

    def _matched(self, sample: Sample) -> list[int]:
        """Cached blocks of its prefix; at least one token is left, since something must give logits."""
        if sample.blocks or not self._cacheable(sample):
            return []
        return self.cache.match(self._keys(sample)[: (sample.length - 1) // self.limits.block_size])

    def _is_in_flight(self, sample: Sample) -> bool:
        """Whether a running sample computes the next block that this one needs."""
        if sample.blocks or not self._cacheable(sample):
            return False
        useful = self._keys(sample)[: (sample.length - 1) // self.limits.block_size]
        found = len(self._matched(sample))
        return found < len(useful) and useful[found] in self.blocks_in_flight

    def _cacheable(self, sample: Sample) -> bool:
        # Prompt logprobs need the logits of every prompt position, and a cache holds none.
        scores = sample.sampling.prompt_logprobs is not None and not sample.output
        return self.limits.prefix_caching and not scores

    def _keys(self, sample: Sample) -> list[bytes]:
        """Cache keys of all full blocks of known tokens."""
        size, keys = self.limits.block_size, sample.cache_keys
        for index in range(len(keys), sample.length // size):
            parent = keys[-1] if keys else root(sample.weights(self.version), sample.salt)
            keys.append(chain(parent, sample.tokens(index * size, (index + 1) * size)))
        return keys

    def _publish(self, sample: Sample) -> None:
        """Full blocks with KV can be found from now on."""
        if not self.limits.prefix_caching or sample.straddles:
            return
        full = sample.computed // self.limits.block_size
        for index in range(sample.published, full):
            key = self._keys(sample)[index]
            self.cache.insert(key, sample.blocks[index])
            self.blocks_in_flight.pop(key, None)
        sample.published = full

    def _finish(self, sample: Sample, reason: FinishReason, problem: Problem | None = None) -> None:
        if sample in self.running:
            self.running.remove(sample)
        elif sample in self.waiting:
            self.waiting.remove(sample)
        self._forget(sample)
        sample.finish(reason, problem)
        del self._samples[sample.key]
        if all(each.phase is Phase.FINISHED for each in self.requests[sample.request_id]):
            del self.requests[sample.request_id]

    def _forget(self, sample: Sample) -> None:
        for key in sample.cache_keys:
            if self.blocks_in_flight.get(key) == sample.key:
                del self.blocks_in_flight[key]
        self.in_flight.release(sample.forget())
