"""What the state machine in tests/property does not pin down: messages, counts, and the order of things."""

import dataclasses
from collections.abc import Callable

import pytest

from zerodrift.core.completion import FinishReason, Problem
from zerodrift.core.errors import (
    InvalidValue,
    InvariantBroken,
)
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import WeightVersion
from zerodrift.engine import consistency
from zerodrift.engine.blocks import BlockPool
from zerodrift.engine.limits import Limits
from zerodrift.engine.plan import Drawn, StepPlan, StepResult
from zerodrift.engine.prefix_cache import PrefixCache
from zerodrift.engine.sample import Phase, Sample, ended_by_tokens
from zerodrift.engine.scheduler import Scheduler

OLD, NEW = WeightVersion("old", "a"), WeightVersion("new", "b")
LIMITS = Limits(block_size=4, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=16, max_waiting=4)


def scheduler(**changes: object) -> Scheduler:
    return Scheduler(dataclasses.replace(LIMITS, **changes), OLD, lambda sample: ended_by_tokens(sample, ()))


def request(name: str, length: int = 6, **settings: object) -> Sample:
    params = SamplingParams(seed=0, **{"max_tokens": 4, **settings})  # type: ignore[arg-type]
    return Sample(0, name, 0, tuple(range(length)), params)


def result(plan: StepPlan) -> StepResult:
    draws = [draw for part in plan.slices for draw in part.draws]
    return StepResult({draw.key: Drawn(50, -1.0, (), None, (), 0.5) for draw in draws}, {}, {})


def step(books: Scheduler) -> StepPlan:
    plan = books.plan()
    books.commit(plan, [result(plan)])
    consistency.check(books)
    return plan


def test_n_samples_start_from_one_prefill_and_copy_one_block_each() -> None:
    books = scheduler()
    books.add(request("r", n=3))
    first = step(books)
    assert [len(part.token_ids) for part in first.slices] == [6]
    assert len(first.slices[0].draws) == 3
    second = step(books)
    assert [part.token_ids for part in second.slices] == [(50,)] * 3
    # The last of three to write finds itself alone with the block.
    assert len(second.copies) == 2
    assert books.pool.num_held == 1 + 3


def test_samples_that_find_no_place_wait_with_their_blocks() -> None:
    books = scheduler(max_num_seqs=2)
    books.add(request("r", n=4))
    step(books)
    assert [sample.sample_index for sample in books.running] == [0, 1]
    assert [sample.sample_index for sample in books.waiting] == [2, 3]
    assert all(sample.blocks for sample in books.waiting)
    while books.samples:
        step(books)
    assert books.counters.forwarded_tokens == 6 + 4 * 3


def test_a_failed_slice_ends_its_request_and_leaves_nothing_behind() -> None:
    books = scheduler()
    books.add(request("a", n=2))
    plan = books.plan()
    problem = Problem("value/non-finite", "NaN")
    ended = books.commit(plan, [StepResult({}, {}, {0: problem})])
    assert [(sample.finish_reason, sample.problem) for sample in ended] == [(FinishReason.ERROR, problem)] * 2
    assert not books.samples
    assert len(books.cache) == 0
    consistency.check(books)


def test_a_failed_draw_ends_its_sample_alone() -> None:
    books = scheduler()
    books.add(request("a", n=2))
    plan = books.plan()
    good = result(plan).drawn
    books.commit(plan, [StepResult({**good, 1: Problem("value/sampling", "no")}, {}, {})])
    assert [sample.key for sample in books.running] == [0]
    consistency.check(books)


@pytest.mark.parametrize("ends", ["commit", "discard"])
def test_one_step_is_in_flight_at_a_time(ends: str) -> None:
    """A second plan would hold the same slices as the first, whose tokens nobody has taken over yet."""
    books = scheduler()
    books.add(request("a"))
    plan = books.plan()
    with pytest.raises(InvariantBroken, match="in flight"):
        books.plan()
    if ends == "commit":
        books.commit(plan, [result(plan)])
    else:
        books.discard()
    consistency.check(books)
    assert [part.start for part in books.plan().slices] == [6 if ends == "commit" else 0]


def test_a_plan_of_nothing_is_not_in_flight() -> None:
    books = scheduler()
    assert books.plan().slices == books.plan().slices == ()


def test_a_step_that_never_lands_is_computed_again() -> None:
    books = scheduler()
    books.add(request("a"))
    books.add(request("b", length=3))
    plan = books.plan()
    books.abort("b")
    books.discard()
    consistency.check(books)
    assert books.pool.num_held == 0
    with pytest.raises(InvariantBroken):
        books.commit(plan, [result(plan)])
    while books.samples:
        step(books)


def test_a_draw_is_what_it_was_when_it_was_planned() -> None:
    books = scheduler()
    books.add(request("a"))
    step(books)
    (sample,) = books.running
    (draw,) = books.plan().slices[0].draws
    sample.output.append(51)
    assert (list(draw.output), len(draw.output), draw.output[:]) == ([50], 1, (50,))


def test_a_step_belongs_to_the_weights_it_was_planned_under() -> None:
    books = scheduler()
    books.add(request("a"))
    plan = books.plan()
    books.swap(NEW)
    with pytest.raises(InvariantBroken, match="planned under weights 'old' was committed under 'new'"):
        books.commit(plan, [result(plan)])


@pytest.mark.parametrize(
    "name", ["block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_waiting"]
)
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(InvalidValue, match=f"{name} is 0"):
        dataclasses.replace(LIMITS, **{name: 0})


def test_the_budget_covers_a_decode_of_everyone() -> None:
    with pytest.raises(InvalidValue, match="max_num_batched_tokens is 3, below max_num_seqs=4"):
        dataclasses.replace(LIMITS, max_num_batched_tokens=3)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda books: books.pool.share(books.running[0].blocks[0]), "references differ in {0: 2}"),
        (
            lambda books: setattr(books, "limits", dataclasses.replace(books.limits, max_num_seqs=1)),
            "2 samples run, and the bound is 1",
        ),
        (lambda books: books.running.reverse(), "out of order"),
        (lambda books: setattr(books.running[0], "phase", Phase.WAITING), "in another phase"),
        (lambda books: books.running.pop(), "are queued"),
        (
            lambda books: books.blocks_in_flight.update({b"key": 99}),
            "have KV blocks in flight and do not run",
        ),
        (lambda books: books.pool.release([books.running[0].blocks.pop()]), "it needs 2 blocks"),
    ],
)
def test_every_contradiction_is_found(damage: Callable[[Scheduler], None], says: str) -> None:
    books = scheduler()
    books.add(request("a"))
    books.add(request("b", length=5, prompt_logprobs=0))
    step(books)
    damage(books)
    with pytest.raises(InvariantBroken, match=says):
        consistency.check(books)
    assert consistency.dump(books)["limits"]["num_blocks"] == 16  # type: ignore[index]


def test_contradictions_of_pool_and_cache_are_found() -> None:
    pool = BlockPool(2)
    pool._free.append(1)
    with pytest.raises(InvariantBroken, match="holds a block twice"):
        pool.check()
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(InvariantBroken, match="it must be in exactly one place"):
        pool.check()
    pool = BlockPool(2)
    pool._kept.add(0)
    with pytest.raises(InvariantBroken, match="kept but free"):
        pool.check()
    pool = BlockPool(2)
    cache = PrefixCache(pool)
    block = pool.allocate()
    cache.insert(b"a", block)
    with pytest.raises(InvariantBroken, match="a full block never changes"):
        cache.insert(b"b", block)
    cache._block_of[b"b"] = block
    with pytest.raises(InvariantBroken, match="inconsistently"):
        cache.check()
    del cache._block_of[b"b"]
    pool._kept.clear()
    with pytest.raises(InvariantBroken, match="the pool keeps blocks"):
        cache.check()


def test_those_who_wait_with_blocks_give_way_when_nobody_runs() -> None:
    """Reached where an old request is overtaken while it waits for another to compute its prefix."""
    books = scheduler(max_num_seqs=1, num_blocks=6, prefix_caching=False)
    old = request("old", length=20)
    books.add(old)
    books.waiting.remove(old)
    books.add(request("young", length=14, n=2, max_tokens=2))
    for _ in range(2):
        plan = books.plan()
        books.commit(plan, [result(plan)])
    (sibling,) = books.waiting
    assert sibling.blocks
    books.waiting.insert(0, old)
    assert [part.key for part in step(books).slices] == [old.key]
    assert not sibling.blocks
    while books.samples:
        step(books)


def test_memory_cannot_be_taken_from_nobody() -> None:
    with pytest.raises(InvariantBroken, match="nobody holds any"):
        scheduler()._victim()
