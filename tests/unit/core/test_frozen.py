import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from zerodrift.core.errors import InvalidValue
from zerodrift.core.frozen import FrozenDict, freeze

CHANGES: list[Callable[[Any], object]] = [
    lambda mapping: mapping.__setitem__("a", 2),
    lambda mapping: mapping.__delitem__("a"),
    lambda mapping: mapping.__ior__({"a": 2}),
    lambda mapping: mapping.clear(),
    lambda mapping: mapping.pop("a"),
    lambda mapping: mapping.popitem(),
    lambda mapping: mapping.setdefault("b", 2),
    lambda mapping: mapping.update(a=2),
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_is_possible(change):
    frozen = FrozenDict({"a": 1})
    with pytest.raises(TypeError):
        change(frozen)
    assert frozen == {"a": 1}
    change({"a": 1})  # what a plain dict lets pass


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_it_is_a_dict_to_everybody_else(again):
    frozen = FrozenDict({"b": 1, "a": 2})
    assert frozen == {"a": 2, "b": 1}
    assert msgspec.json.encode(frozen, order="sorted") == b'{"a":2,"b":1}'
    assert type(msgspec.to_builtins(frozen)) is dict
    assert frozen | {"c": 3} == {"a": 2, "b": 1, "c": 3}
    assert len({frozen, FrozenDict({"a": 2, "b": 1}), FrozenDict({"a": 3})}) == 2
    assert (type(again(frozen)), again(frozen)) == (FrozenDict, frozen)


class Holder(msgspec.Struct, frozen=True):
    facts: Any

    def __post_init__(self) -> None:
        freeze(self, "facts")


def test_what_is_given_is_copied():
    given = {"a": 1}
    holder = Holder(given)
    given["a"] = 2
    assert holder.facts == {"a": 1}
    assert type(msgspec.json.decode(b'{"facts": {"a": 1}}', type=Holder).facts) is FrozenDict


@pytest.mark.parametrize("value", [None, 5, "ab", [("a", 1)]])
def test_what_is_no_mapping(value):
    with pytest.raises(InvalidValue):
        Holder(value)
