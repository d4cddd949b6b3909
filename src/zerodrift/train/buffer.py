"""Groups between whoever generates and whoever learns: which to ask for, which to learn from, which are too old.

Torch-free and without a clock: what it decides follows from the order of calls alone, so a recorded schedule gives the same
batches again. Groups are consumed in the order of their index. Those asked for and not yet consumed are at most `capacity`:
an actor that is faster than the learner waits, and so does a learner that is faster than the actor.
"""

from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from zerodrift.config.training import OnLag, TrainConfig
from zerodrift.core.errors import InvalidValue


class Aged(Protocol):
    """What it has to know of a group."""

    @property
    def oldest(self) -> int:
        """Version of the oldest weights in it."""
        ...


GroupT = TypeVar("GroupT", bound=Aged)


class Batch(NamedTuple, Generic[GroupT]):
    """What one step learns from."""

    groups: tuple[tuple[int, GroupT], ...]
    dropped: tuple[int, ...]
    """Groups that were older than the bound."""


class GroupBuffer(Generic[GroupT]):
    """One step takes `groups`; no token that it learns from is more than `max_lag` versions old."""

    def __init__(self, config: TrainConfig, *, cursor: int = 0) -> None:
        """Of groups before `cursor`, all are consumed."""
        self._size, self._max_lag, self._on_lag = config.groups, config.max_lag, config.on_lag
        self._capacity = config.capacity
        self._cursor = self._next = cursor
        self._ready: dict[int, GroupT] = {}
        self._dropped: list[int] = []
        self._kept: list[tuple[int, GroupT]] = []

    @property
    def first(self) -> int:
        """Every group before it was learnt from or dropped."""
        return self._cursor - len(self._kept) - len(self._dropped)

    @property
    def pending(self) -> tuple[int, ...]:
        """Asked for, and not here yet."""
        return tuple(index for index in range(self._cursor, self._next) if index not in self._ready)

    @property
    def needed(self) -> tuple[int, ...]:
        """Those of `pending` that the next batch waits for, as far as is known."""
        return tuple(index for index in self.pending if index < self._cursor + self._size - len(self._kept))

    def ask(self) -> Iterator[int]:
        """Indices to ask for now, in order; each is asked for once."""
        while self._next - self._cursor + len(self._kept) < self._capacity and self._in_time(self._next):
            self._next += 1
            yield self._next - 1

    def put(self, index: int, group: GroupT) -> None:
        """A group that was asked for has come."""
        if not self._cursor <= index < self._next or index in self._ready:
            raise InvalidValue(f"group {index} came, which was not asked for or came before")
        self._ready[index] = group

    def take(self, version: int) -> Batch[GroupT] | None:
        """A batch for the weights of `version`; None until enough of the groups that were asked for are here.

        What is dropped makes room, so `ask` again before waiting.
        """
        while len(self._kept) < self._size and self._cursor in self._ready:
            index, group = self._cursor, self._ready.pop(self._cursor)
            self._cursor += 1
            if version - group.oldest <= self._max_lag:
                self._kept.append((index, group))
            elif self._on_lag is OnLag.DROP:
                self._dropped.append(index)
            else:
                raise InvalidValue(
                    f"group {index} has tokens of version {group.oldest}, which is {version - group.oldest} behind, and "
                    f"max_lag={self._max_lag} was held: the engine serves other weights than it was given"
                )
        if len(self._kept) < self._size:
            return None
        batch = Batch(tuple(self._kept), tuple(self._dropped))
        self._kept, self._dropped = [], []
        return batch

    def _in_time(self, index: int) -> bool:
        """Where groups are held back: asked for now, it is trained on within the bound."""
        first = self._cursor - len(self._kept)
        return self._on_lag is OnLag.DROP or (index - first) // self._size <= self._max_lag
