"""Mappings inside frozen values: a struct that cannot be changed must not hold a dict that can.

One changed in place would pass by every check of its constructor, change a digest behind its owner's back, and, as
the default of a field, change that default for everybody.
"""

from collections.abc import Mapping
from typing import NoReturn, TypeVar

import msgspec

from zerodrift.core.errors import InvalidValue

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that is finished: equal to a plain one and encoded like one, but hashable and never changed."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "this mapping is part of a frozen value; copy it with dict(...), and give the copy to "
            "msgspec.structs.replace"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Of the items, in any order."""
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type["FrozenDict[K, V]"], tuple[dict[K, V]]]:
        """Copies and other processes get it whole: item by item it would refuse to be filled."""
        return FrozenDict, (dict(self),)


def freeze(struct: msgspec.Struct, *names: str) -> None:
    """For `__post_init__`: keep a finished copy of each mapping that was given under one of `names`."""
    for name in names:
        value = getattr(struct, name)
        if not isinstance(value, Mapping):
            raise InvalidValue(f"{name} is {value!r}; give a mapping")
        msgspec.structs.force_setattr(struct, name, FrozenDict(value))


class FrozenFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A struct in which every field that was given a mapping keeps a finished copy of it."""

    def __post_init__(self) -> None:
        """Facts stay as they were written."""
        freeze(self, *(name for name in self.__struct_fields__ if isinstance(getattr(self, name), Mapping)))
