"""Which point in a row is to be looked at next, and between which two neighbours does the change lie?

All of it is a function of what has been looked at so far, so a search that was killed goes on by asking again. A point
that cannot be judged is passed over for its nearest neighbour, as `git bisect skip` does.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

Differs = Callable[[int, int], bool]
"""Of two points that were judged."""


class Look(NamedTuple):
    """There is more to look at."""

    at: int
    low: int
    high: int
    """The change lies between these two."""
    candidates: int
    """Points between them that may still be looked at."""

    @property
    def steps_left(self) -> int:
        """If all of them can be judged, this one included."""
        return self.candidates.bit_length()


class Between(NamedTuple):
    """The change lies between two points that differ, with nothing between them that could be judged."""

    low: int
    high: int
    skipped: tuple[int, ...]
    """Points between them: the change came with one of these, or with `high`."""
    unlike: tuple[int, ...]
    """Points looked at outside that are unlike the end on their side: there is more than one change."""


class Alike(NamedTuple):
    """The two ends do not differ: there is nothing between them to be found by halving."""


class EndSkipped(NamedTuple):
    """An end that cannot be judged: nothing is known to differ."""

    end: int


def next_look(
    count: int, judged: Collection[int], skipped: Collection[int], differs: Differs
) -> Look | Between | Alike | EndSkipped:
    """What to do about `count` points in a row. The ends come first; then the middle of what is left."""
    low, high = 0, count - 1
    for end in (low, high):
        if end in skipped:
            return EndSkipped(end)
        if end not in judged:
            return Look(end, low, high, max(0, count - 2 - len(skipped)))
    if not differs(low, high):
        return Alike()
    while True:
        inside = [point for point in range(low + 1, high) if point not in skipped]
        if not inside:
            left = tuple(point for point in range(low + 1, high))
            return Between(low, high, left, _unlike(judged, low, high, differs))
        # Those that are known cost nothing.
        known = [point for point in inside if point in judged]
        at = _nearest(known or inside, low, high)
        if not known:
            return Look(at, low, high, len(inside))
        if differs(low, at):
            high = at
        else:
            low = at


def _nearest(points: Sequence[int], low: int, high: int) -> int:
    """To the middle; of two, the older."""
    return min(points, key=lambda point: (abs(2 * point - low - high), point))


def _unlike(judged: Collection[int], low: int, high: int, differs: Differs) -> tuple[int, ...]:
    """With one change, all before it are as `low`, and all behind it as `high`."""
    before = [point for point in judged if point < low and differs(point, low)]
    behind = [point for point in judged if point > high and differs(high, point)]
    return tuple(sorted([*before, *behind]))
