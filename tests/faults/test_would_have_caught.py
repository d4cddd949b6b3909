"""Some of the public bugs again, at the smallest size that shows them; all of them are `make history`."""

from typing import Any

import pytest

from zerodrift.core.cause import CAUSES

CAUGHT = [
    ("NeMo-RL#3297", 256),
    ("verl#5179", 256),
    ("trl#5312", 64),
    ("prime-rl#2823", 64),
    ("AReaL#1569", 256),
]


@pytest.mark.long
@pytest.mark.parametrize(("reported", "tokens"), CAUGHT, ids=[reported for reported, _ in CAUGHT])
def test_a_public_bug_is_caught_and_named(would_have_caught, reported, tokens):
    (bug,) = [each for each in would_have_caught.BUGS if each.reported == reported]
    row = would_have_caught.run_one(reported, bug.models[0], tokens, seed=1)
    assert row.caught
    assert would_have_caught.named(bug, row) == "right", (row.found, row.says)


def test_bugs_are_told_apart_and_their_causes_exist(would_have_caught):
    bugs = [*would_have_caught.BUGS, *would_have_caught.ELSEWHERE]
    assert len({bug.reported for bug in bugs}) == len(bugs)
    for bug in would_have_caught.BUGS:
        assert bug.causes
        assert bug.causes <= set(CAUSES), bug.reported


def test_what_is_not_run_has_its_reason(would_have_caught):
    for bug in would_have_caught.ELSEWHERE:
        assert len(bug.unseen.split()) > 5, bug.reported


@pytest.fixture
def bug(would_have_caught):
    """One whose true name is a single cause."""
    return next(each for each in would_have_caught.BUGS if each.reported == "trl#4159")


def row(would_have_caught: Any, bug: Any, tokens: int, seed: int, verdict: str, *found: str) -> Any:
    return would_have_caught.Row(
        bug=bug.reported,
        model=bug.models[0],
        tokens=tokens,
        seed=seed,
        verdict=verdict,
        guilty="engine",
        found=found,
        says="",
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (("semantic/raw-logprobs",), "right"),
        (("semantic/temperature", "semantic/raw-logprobs"), "wrong"),
        (("unexplained",), "unexplained"),
        ((), "wrong"),
    ],
)
def test_the_principal_cause_decides(would_have_caught, bug, found, kind):
    assert would_have_caught.named(bug, row(would_have_caught, bug, 1024, 0, "FAIL", *found)) == kind


def test_the_search_goes_up_at_the_first_seed_that_does_not_fail(would_have_caught, bug):
    rows: list[Any] = []
    steps = []
    while (step := would_have_caught.next_step(bug, rows)) is not None:
        steps.append(step)
        tokens, seed = step
        fails = tokens >= 256 or seed == 1
        rows.append(row(would_have_caught, bug, tokens, seed, "FAIL" if fails else "PASS"))
    assert steps == [(64, 1), (64, 2), (128, 1), (128, 2), (256, 1), (256, 2), (256, 3)]
    assert would_have_caught.fewest(bug, rows) == 256


def test_the_search_ends_where_nothing_is_found(would_have_caught, bug):
    rows = [row(would_have_caught, bug, tokens, 1, "PASS") for tokens in would_have_caught.SIZES]
    assert would_have_caught.next_step(bug, rows) is None
    assert would_have_caught.fewest(bug, rows) is None
