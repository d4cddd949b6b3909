import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerodrift.bisect.halving import Alike, Between, EndSkipped, Look, next_look


def search(states, bad=frozenset(), known=()):
    """The answer of a search among points in such states, and what it looked at, in order."""
    judged, skipped, looked = set(known), set(), []
    while True:
        step = next_look(len(states), judged, skipped, lambda low, high: states[low] != states[high])
        if not isinstance(step, Look):
            return step, looked
        assert step.at not in judged | skipped, "looked at twice"
        looked.append(step.at)
        (skipped if step.at in bad else judged).add(step.at)


@st.composite
def one_change(draw):
    """Points with one change among them, and some inside that cannot be judged."""
    count = draw(st.integers(2, 60))
    change = draw(st.integers(1, count - 1))
    inside = st.sets(st.integers(1, max(1, count - 2)), max_size=count)
    bad = draw(inside) - {0, count - 1}
    return [0] * change + [1] * (count - change), change, bad


@given(st.integers(2, 500).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count - 1))))
def test_any_one_change_is_found_in_log2_steps(case):
    count, change = case
    found, looked = search([0] * change + [1] * (count - change))
    assert found == Between(change - 1, change, (), ())
    assert len(looked) <= 2 + math.ceil(math.log2(count - 1))


@given(one_change())
def test_what_cannot_be_judged_is_passed_over_and_said(case):
    states, change, bad = case
    found, looked = search(states, bad)
    assert isinstance(found, Between)
    assert found.low < change <= found.high
    assert states[found.low] != states[found.high]
    assert set(range(found.low + 1, found.high)) == set(found.skipped) <= bad
    assert found.unlike == ()
    assert len(looked) <= 2 + math.ceil(math.log2(max(2, len(states) - 1))) + len(bad)


@given(one_change(), st.data())
def test_a_search_that_was_killed_goes_on_as_it_would_have(case, data):
    states, _, bad = case
    found, looked = search(states, bad)
    before = looked[: data.draw(st.integers(0, len(looked)))]
    again, rest = search(states, bad, known=[each for each in before if each not in bad])
    assert again == found
    assert [each for each in rest if each not in bad] == [
        each for each in looked if each not in before and each not in bad
    ]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_several_changes_end_with_neighbours_that_differ(states):
    found, _ = search(states)
    if states[0] == states[-1]:
        assert found == Alike()
        return
    assert isinstance(found, Between)
    assert found.high == found.low + 1
    assert states[found.low] != states[found.high]


@given(st.lists(st.integers(0, 3), min_size=3, max_size=40).filter(lambda states: states[0] != states[-1]))
def test_with_all_looked_at_before_more_than_one_change_is_never_missed(states):
    found, _ = search(states, known=range(len(states)))
    changes = sum(one != other for one, other in pairwise(states))
    assert (found.unlike != ()) == (changes > 1)


def test_a_middle_like_neither_end_is_more_than_one_change():
    found, looked = search([0, 0, 2, 2, 1])
    assert looked == [0, 4, 2, 1]
    assert found == Between(1, 2, (), unlike=(4,))


@pytest.mark.parametrize("end", [0, 4])
def test_an_end_that_cannot_be_judged_ends_it(end):
    found, looked = search([0, 0, 1, 1, 1], bad={end})
    assert found == EndSkipped(end)
    assert looked == ([0] if end == 0 else [0, 4])


def test_nothing_between_that_can_be_judged():
    found, looked = search([0, 0, 1, 1, 1], bad={1, 2, 3})
    assert found == Between(0, 4, (1, 2, 3), ())
    assert looked == [0, 4, 2, 1, 3]


@pytest.mark.parametrize(("candidates", "steps"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (31, 5)])
def test_steps_left(candidates, steps):
    assert Look(0, 0, 9, candidates).steps_left == steps
