"""The block pool and the prefix cache against naive models: lists of references, and a dictionary of prefixes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from zerodrift.core.errors import InvariantBroken
from zerodrift.engine.blocks import BlockPool
from zerodrift.engine.prefix_cache import PrefixCache, chain, root

NUM_BLOCKS = 6
# A quarter of the profile's examples: one example is a history of thirty rules.
MACHINE = settings(max_examples=settings().max_examples // 4, stateful_step_count=30, deadline=None)
# A planted bug only has to be found, not to be made small.
QUIET = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.generate],
    derandomize=True,
)
BLOCK = st.integers(0, NUM_BLOCKS - 1)


class PoolMachine(RuleBasedStateMachine):
    """The model: a multiset of references, the set of kept blocks, and idle blocks in the order of release."""

    make: Callable[[], BlockPool] = lambda self: BlockPool(NUM_BLOCKS)

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.make()
        self.held: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.idle: list[int] = []

    @rule()
    def allocate(self) -> None:
        free = NUM_BLOCKS - len(+self.held) - len(self.idle)
        if not free:
            with pytest.raises(InvariantBroken, match="none of 6 KV blocks is free"):
                self.pool.allocate()
            return
        block = self.pool.allocate()
        assert self.held[block] == 0
        assert block not in self.idle
        self.held[block] += 1

    @rule(block=BLOCK)
    def share(self, block: int) -> None:
        if self.held[block] or block in self.idle:
            self.pool.share(block)
            self.held[block] += 1
            self.idle = [each for each in self.idle if each != block]
        else:
            with pytest.raises(InvariantBroken, match="is free"):
                self.pool.share(block)

    @rule(block=BLOCK)
    def release(self, block: int) -> None:
        if not self.held[block]:
            with pytest.raises(InvariantBroken, match="more often"):
                self.pool.release([block])
            return
        self.pool.release([block])
        self.held[block] -= 1
        if not self.held[block] and block in self.kept:
            self.idle.append(block)

    @rule(block=BLOCK)
    def keep(self, block: int) -> None:
        if self.held[block]:
            self.pool.keep(block)
            self.kept.add(block)
        else:
            with pytest.raises(InvariantBroken, match="not held"):
                self.pool.keep(block)

    @rule(blocks=st.permutations(range(NUM_BLOCKS)))
    def retire(self, blocks: list[int]) -> None:
        """Keep everything that is held, and let go of it in some order."""
        for block in blocks:
            if self.held[block]:
                self.keep(block)
                for _ in range(self.held[block]):
                    self.release(block)

    @rule()
    def reclaim(self) -> None:
        if not self.idle:
            with pytest.raises(InvariantBroken, match="no KV block is idle"):
                self.pool.reclaim()
            return
        oldest = self.idle.pop(0)
        assert self.pool.reclaim() == oldest
        self.kept.remove(oldest)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        held = +self.held
        assert {block: self.pool.references(block) for block in range(NUM_BLOCKS)} == {
            block: held[block] for block in range(NUM_BLOCKS)
        }
        assert self.pool.kept == self.kept
        counts = (len(held), len(self.idle), NUM_BLOCKS - len(held) - len(self.idle))
        assert (self.pool.num_held, self.pool.num_idle, self.pool.num_free) == counts


TestPool = PoolMachine.TestCase
TestPool.settings = MACHINE


class ForgetsToDecrement(BlockPool):
    def release(self, blocks: Any) -> None:
        for block in list(blocks):
            if self.references(block) != 2:
                super().release([block])


class FreesSharedBlocks(BlockPool):
    def release(self, blocks: Any) -> None:
        for block in list(blocks):
            super().release([block])
            if self._references[block] == 1:
                self._references[block] = 0
                self._free.append(block)


class EvictsTheNewest(BlockPool):
    def reclaim(self) -> int:
        self._idle = dict(reversed(self._idle.items()))
        return super().reclaim()


class LeavesRevivedBlocksIdle(BlockPool):
    def share(self, block: int) -> None:
        idle = block in self._idle
        super().share(block)
        if idle:
            self._idle[block] = None


@pytest.mark.parametrize(
    "broken", [ForgetsToDecrement, FreesSharedBlocks, EvictsTheNewest, LeavesRevivedBlocksIdle]
)
def test_a_planted_bug_in_the_pool_is_caught(broken: type[BlockPool]) -> None:
    class Planted(PoolMachine):
        make = lambda self: broken(NUM_BLOCKS)  # noqa: E731

    with pytest.raises((AssertionError, InvariantBroken, ExceptionGroup)):
        run_state_machine_as_test(Planted, settings=QUIET)


TOKENS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=4)
WEIGHTS = st.sampled_from(["old", "new"])
SALTS = st.sampled_from([None, "", "a"])


class CacheMachine(RuleBasedStateMachine):
    """The model: whole prefixes, with weights and salt, to blocks."""

    keys: Callable[..., list[bytes]]

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool)
        self.known: dict[tuple[Any, ...], int] = {}
        self.idle: list[int] = []
        self.held: list[tuple[tuple[Any, ...], int]] = []

    @staticmethod
    def keys_of(weights: str, salt: str | None, blocks: list[tuple[int, int]]) -> list[bytes]:
        keys, parent = [], root(weights, salt)
        for tokens in blocks:
            parent = chain(parent, tokens)
            keys.append(parent)
        return keys

    @rule(weights=WEIGHTS, salt=SALTS, blocks=TOKENS)
    def compute(self, weights: str, salt: str | None, blocks: list[tuple[int, int]]) -> None:
        """Find what is there, compute the rest as far as there is room, and hold all of it."""
        keys = self.keys_of(weights, salt, blocks)
        names = [(weights, salt, *blocks[: end + 1]) for end in range(len(blocks))]
        found = self.cache.match(keys)
        expected = []
        for name in names:
            if name not in self.known:
                break
            expected.append(self.known[name])
        assert found == expected
        for name, block in zip(names, found, strict=False):
            self.pool.share(block)
            self.held.append((name, block))
            self.idle = [each for each in self.idle if each != block]
        for name, key in list(zip(names, keys, strict=True))[len(found) :]:
            self.cache.make_room(1)
            self._forget_evicted()
            if not self.pool.num_free:
                break
            block = self.pool.allocate()
            self.cache.insert(key, block)
            self.held.append((name, block))
            self.known.setdefault(name, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name, block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release([block])
        if self.pool.references(block) == 0 and self.known.get(name) == block:
            self.idle.append(block)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self._forget_evicted()
        assert not self.idle
        assert self.pool.num_idle == 0

    def _forget_evicted(self) -> None:
        """Exactly the least recently released are gone."""
        gone = len(self.idle) - self.pool.num_idle
        evicted, self.idle = self.idle[:gone], self.idle[gone:]
        self.known = {name: block for name, block in self.known.items() if block not in evicted}

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        self.cache.check()
        assert len(self.cache) == len(self.known)
        assert self.pool.num_idle == len(self.idle)


TestCache = CacheMachine.TestCase
TestCache.settings = MACHINE


def _without_weights(weights: str, salt: str | None, blocks: Any) -> list[bytes]:
    return CacheMachine.keys_of("any", salt, blocks)


def _without_salt(weights: str, salt: str | None, blocks: Any) -> list[bytes]:
    return CacheMachine.keys_of(weights, salt or None, blocks)


def _without_parents(weights: str, salt: str | None, blocks: Any) -> list[bytes]:
    return [chain(root(weights, salt), tokens) for tokens in blocks]


@pytest.mark.parametrize("keys", [_without_weights, _without_salt, _without_parents])
def test_a_key_that_leaves_something_out_is_caught(keys: Any) -> None:
    class Planted(CacheMachine):
        keys_of = staticmethod(keys)

    with pytest.raises((AssertionError, InvariantBroken, ExceptionGroup)):
        run_state_machine_as_test(Planted, settings=QUIET)


def test_strings_do_not_run_into_each_other() -> None:
    assert len({root("a", "bc"), root("ab", "c"), root("a", None), root("a", ""), root("a", "none")}) == 5
