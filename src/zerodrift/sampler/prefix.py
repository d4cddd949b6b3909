"""The beginning of a sequence that is long, or still grows."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload


class Prefix(Sequence[int]):
    """The first `length` of `whole`, without a copy: an output of 32k tokens has prefixes of 4 GB together."""

    __slots__ = ("_length", "whole")

    def __init__(self, whole: Sequence[int], length: int) -> None:
        """`whole` has at least `length` ids, and at most grows: what stands there stays."""
        self.whole = whole
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self.whole, self._length)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        """An id, or a tuple of some."""
        places = range(self._length)[index]
        if isinstance(places, int):
            return self.whole[places]
        if places.step == 1:
            return tuple(self.whole[places.start : places.stop])
        return tuple(self.whole[place] for place in places)
