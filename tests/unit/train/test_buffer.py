"""What the buffer promises, under any order of arrivals: every token within the bound, and never more than there is room."""

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerodrift.config.training import OnLag, TrainConfig
from zerodrift.core.errors import InvalidValue
from zerodrift.train.buffer import GroupBuffer


class Group(NamedTuple):
    oldest: int


def config_of(**changes):
    return msgspec.structs.replace(TrainConfig(), **changes)


@given(
    groups=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    on_lag=st.sampled_from(OnLag),
    extra=st.integers(0, 6),
    data=st.data(),
)
def test_any_order_of_arrivals(groups, max_lag, on_lag, extra, data) -> None:
    room = {"buffer_groups": groups + extra} if on_lag is OnLag.DROP else {}
    config = config_of(groups=groups, max_lag=max_lag, on_lag=on_lag, **room)
    buffer = GroupBuffer(config)
    asked, consumed, flying = [], [], {}
    for version in range(6):
        batch = None
        while batch is None:
            for index in buffer.ask():
                asked.append(index)
                flying[index] = version
            assert len(flying) <= config.capacity, "an actor that is faster than the learner waits"
            assert flying or buffer.pending == (), "somebody always has something to do"
            if flying:
                # Any of those in flight comes next.
                index = data.draw(st.sampled_from(sorted(flying)))
                buffer.put(index, Group(flying.pop(index)))
            batch = buffer.take(version)
        indices = [index for index, _ in batch.groups]
        assert len(indices) == groups
        assert all(version - group.oldest <= max_lag for _, group in batch.groups)
        assert sorted((*indices, *batch.dropped)) == list(range(len(consumed), buffer.first)), (
            "in order, each once"
        )
        assert on_lag is OnLag.DROP or not batch.dropped
        consumed += [*indices, *batch.dropped]
    assert asked == list(range(len(asked)))


def test_hold_runs_ahead_by_the_lag_and_no_further() -> None:
    buffer = GroupBuffer(config_of(groups=2, max_lag=1))
    assert list(buffer.ask()) == [0, 1, 2, 3]
    assert list(buffer.ask()) == []
    buffer.put(1, Group(0))
    assert buffer.take(0) is None
    buffer.put(0, Group(0))
    assert [index for index, _ in buffer.take(0).groups] == [0, 1]
    assert list(buffer.ask()) == [4, 5]
    assert buffer.pending == (2, 3, 4, 5)


def test_drop_names_what_came_too_late() -> None:
    buffer = GroupBuffer(config_of(groups=1, max_lag=0, on_lag=OnLag.DROP, buffer_groups=3))
    for index in buffer.ask():
        buffer.put(index, Group(0))
    assert buffer.take(0) == (((0, Group(0)),), ())
    assert buffer.take(1) is None, "both others are a version old"
    for index in buffer.ask():
        buffer.put(index, Group(1))
    assert buffer.take(1) == (((3, Group(1)),), (1, 2))


def test_an_engine_that_stayed_behind_is_refused() -> None:
    buffer = GroupBuffer(config_of(groups=1, max_lag=1))
    for index in buffer.ask():
        buffer.put(index, Group(0))
    buffer.take(0)
    buffer.take(1)
    for index in buffer.ask():
        buffer.put(index, Group(0))
    with pytest.raises(InvalidValue, match="2 behind, and max_lag=1"):
        buffer.take(2)


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_what_was_not_asked_for_is_refused(index) -> None:
    buffer = GroupBuffer(config_of(groups=2, max_lag=0))
    assert list(buffer.ask()) == [0, 1]
    with pytest.raises(InvalidValue, match=f"group {index} came"):
        buffer.put(index, Group(0))
    buffer.put(0, Group(0))
    with pytest.raises(InvalidValue, match="came before"):
        buffer.put(0, Group(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 4, "buffer_groups": 3}, "buffer_groups is 3; a step takes 4 groups at once"),
        ({"groups": 4, "max_lag": 1, "buffer_groups": 9}, "at most 8 groups can be trained on in time"),
        ({"max_lag": -1}, "max_lag is -1"),
    ],
)
def test_a_lag_bound_that_can_never_be_met_is_refused(changes, message) -> None:
    with pytest.raises(InvalidValue, match=message):
        TrainConfig(**changes)
